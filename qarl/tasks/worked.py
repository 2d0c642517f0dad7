"""QaRL's own tasks whose answers are worked solutions, as datasets.

The policy may write any working: the text after its last "=" is the answer, and is right or wrong.
"""

import random
from dataclasses import dataclass
from typing import Any

from qarl.tasks.dataset import Dataset


@dataclass
class RunningTotalConfig:
    """Sizes of the chain."""

    min_terms: int = 16  # Fewest numbers of a chain
    max_terms: int = 16  # Most numbers of a chain
    digits: int = 1  # Digits of a number; the total keeps to one more
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise AssertionError for invalid sizes, as reasoning-gym's own configurations do."""
        assert self.min_terms > 1, "min_terms must be at least 2"
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"
        assert self.digits > 0, "digits must be positive"


class _WorkedDataset(Dataset):
    """Datasets of sums. The last number of a solution is its answer."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return 1.0 if the final answer is the sum, else 0.0."""
        return float(final_answer(answer or "") == entry["answer"])


class RunningTotalDataset(_WorkedDataset):
    """Add and subtract a chain of numbers, writing down every running total"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return problem `index`, from a generator of its own."""
        terms = self._terms(random.Random(self.seed + index))
        solution = running_totals(terms)
        summands = "".join(f" {_signed(term)}" for term in terms[1:])
        return {
            "question": f"Add step by step: {terms[0]}{summands}",
            "answer": final_answer(solution),
            "metadata": {"terms": terms, "worked_solution": solution},
        }

    def _terms(self, generator: random.Random) -> list[int]:
        """Return numbers to add; negative ones are subtracted.

        Every partial sum is in [0, 10^(digits + 1)).
        """
        count = generator.randint(self.config.min_terms, self.config.max_terms)
        smallest = 10 ** (self.config.digits - 1)
        limit = 10 ** (self.config.digits + 1)
        total = 0
        terms = []
        for _ in range(count):
            number = generator.randint(smallest, limit // 10 - 1)
            allowed = [term for term in (number, -number) if 0 <= total + term < limit]
            terms.append(generator.choice(allowed))
            total += terms[-1]
        return terms


@dataclass
class LookupSumConfig:
    """Sizes of the sum."""

    min_terms: int = 4  # Fewest names of a sum
    max_terms: int = 4  # Most names of a sum
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise AssertionError for invalid sizes, as reasoning-gym's own configurations do."""
        assert self.min_terms > 1, "min_terms must be at least 2"
        assert 50 >= self.max_terms >= self.min_terms, (
            "max_terms must be >= min_terms, and at most 50"
        )


class LookupSumDataset(_WorkedDataset):
    """Add numbers that only a tool knows, by their names"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return problem `index`, from a generator of its own."""
        generator = random.Random(self.seed + index)
        count = generator.randint(self.config.min_terms, self.config.max_terms)
        names = [f"{number:02d}" for number in generator.sample(range(100), count)]
        numbers = {name: generator.randint(1, 9) for name in names}
        solution = running_totals(list(numbers.values()))
        return {
            "question": f"Look up and add: {' '.join(names)}",
            "answer": final_answer(solution),
            "metadata": {"values_by_name": numbers, "worked_solution": solution},
        }


def running_totals(terms: list[int]) -> str:
    """Return the sum of `terms` worked out, one addition or subtraction per line.

    It starts from the first number.
    """
    lines = []
    total = terms[0]
    for term in terms[1:]:
        lines.append(f"{total} {_signed(term)} = {total + term}")
        total += term
    return "\n".join(lines)


def final_answer(text: str) -> str:
    """Return the text after the last "=", stripped, or the whole text if there is none."""
    return text.rpartition("=")[2].strip()


def _signed(term: int) -> str:
    return f"{'+' if term >= 0 else '-'} {abs(term)}"
