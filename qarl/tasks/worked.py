"""Tasks of QaRL's own whose answers are worked solutions, written as reasoning-gym datasets and
registered as such.

The policy may work as it likes: what follows the last "=" of its text is the answer, and right or
wrong. Imported with reasoning-gym only (`qarl.tasks.procedural.reasoning_gym_datasets`), which
takes seconds.
"""

import random
from dataclasses import dataclass
from typing import Any

from reasoning_gym.factory import ProceduralDataset, register_dataset


@dataclass
class RunningTotalConfig:
    """Sizes of the chain."""

    min_terms: int = 16  # Fewest numbers of a chain
    max_terms: int = 16  # Most numbers of a chain
    digits: int = 1  # Digits of a number; the total keeps to one more
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raises AssertionError as reasoning-gym's own configurations do."""
        assert self.min_terms > 1, "min_terms must be at least 2"
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"
        assert self.digits > 0, "digits must be positive"


class _WorkedDataset(ProceduralDataset):
    """Sums, of which the last number that is written counts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """1.0 where the final answer is the sum, else 0.0."""
        return float(final_answer(answer or "") == entry["answer"])


class RunningTotalDataset(_WorkedDataset):
    """Add and subtract a chain of numbers, writing down every running total"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Problem `index`, from a generator of its own."""
        terms = self._terms(random.Random(self.seed + index))
        solution = running_totals(terms)
        return {
            "question": (
                f"Add step by step: {terms[0]}{''.join(f' {_signed(term)}' for term in terms[1:])}"
            ),
            "answer": final_answer(solution),
            "metadata": {"terms": terms, "worked_solution": solution},
        }

    def _terms(self, generator: random.Random) -> list[int]:
        """Numbers to add, negative ones to subtract; every total of a prefix is in [0, 10^(digits +
        1)).
        """
        count = generator.randint(self.config.min_terms, self.config.max_terms)
        smallest, limit = 10 ** (self.config.digits - 1), 10 ** (self.config.digits + 1)
        total, terms = 0, []
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
        """Raises AssertionError as reasoning-gym's own configurations do."""
        assert self.min_terms > 1, "min_terms must be at least 2"
        assert 50 >= self.max_terms >= self.min_terms, (
            "max_terms must be >= min_terms, and at most 50"
        )


class LookupSumDataset(_WorkedDataset):
    """Add numbers that only a tool knows, by their names"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Problem `index`, from a generator of its own."""
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
    """The sum of `terms` worked out, one addition or subtraction a line, from the first number
    on.
    """
    lines, total = [], terms[0]
    for term in terms[1:]:
        lines.append(f"{total} {_signed(term)} = {total + term}")
        total += term
    return "\n".join(lines)


def final_answer(text: str) -> str:
    """What follows the last "=", stripped; the whole text where there is none."""
    return text.rpartition("=")[2].strip()


def _signed(term: int) -> str:
    return f"{'+' if term >= 0 else '-'} {abs(term)}"


register_dataset("running_total", RunningTotalDataset, RunningTotalConfig)
register_dataset("lookup_sum", LookupSumDataset, LookupSumConfig)
