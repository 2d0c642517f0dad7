"""QaRL's task of answers that follow a rule of form, as a dataset.

A small language model that answers fluently follows few of the rules by itself: SmolLM2-135M 9 %,
and 53 to 62 % after twenty steps in bf16 (docs/lab/real.md).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qarl.tasks.dataset import Dataset

SUBJECTS = (
    "owls",
    "snow",
    "bakeries",
    "the violin",
    "rivers",
    "clouds",
    "ants",
    "candles",
    "the moon",
    "islands",
    "ferries",
    "pepper",
    "wool",
    "castles",
    "storms",
    "roses",
    "mushrooms",
    "pianos",
    "camels",
    "harbours",
    "silk",
    "thunder",
    "wells",
    "sparrows",
    "honey",
    "railways",
    "ice",
    "attics",
    "meadows",
    "sand",
    "lanterns",
    "orchards",
    "whales",
    "mountains",
    "ink",
    "tides",
    "bells",
    "olives",
    "foxes",
    "the sun",
)
"""Subjects of the questions."""

NUMBERS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
}
"""Numbers that a rule may name."""

RULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "lowercase": ("Use lowercase letters only.", ("-",)),
    "uppercase": ("WRITE IN CAPITAL LETTERS ONLY.", ("-",)),
    "words": ("Use exactly {} words.", ("six", "five", "seven", "eight")),
    "first": ("Start with the word {}.", ("Perhaps", "Today", "Imagine")),
    "last": ("Let the last word be {}.", ("always", "again", "together")),
    "without": ("Avoid the letters t-h-e in a row.", ("the",)),
    "question": ("Write one question and nothing else.", ("-",)),
    "lines": ("Write exactly {} lines.", ("two", "three")),
}
"""Name of a rule → the sentence that states it, and the values it may have ("-": none)."""

SHORTEST = 3
"""Fewest words of an answer that may follow a rule, so that no rule is met by saying nothing."""

_FOLLOWS: dict[str, Callable[[str, list[str], str], bool]] = {
    "lowercase": lambda text, words, value: text == text.lower(),
    "uppercase": lambda text, words, value: text == text.upper(),
    "words": lambda text, words, value: len(words) == NUMBERS[value],
    "first": lambda text, words, value: words[0].strip(",.!").lower() == value.lower(),
    "last": lambda text, words, value: words[-1].strip(".!").lower() == value.lower(),
    "without": lambda text, words, value: value not in text.lower(),
    "question": lambda text, words, value: (
        text.strip().endswith("?") and text.count("?") == 1 and not re.search(r"[.!]", text)
    ),
    "lines": lambda text, words, value: (
        len([line for line in text.splitlines() if line.strip()]) == NUMBERS[value]
    ),
}
"""Name of a rule → whether a text, split into words, follows it with this value."""


def follows(rule: str, value: str, text: str) -> bool:
    """Return whether `text` has at least `SHORTEST` words and follows a rule of `RULES`.

    Raises `KeyError` for an unknown rule, or for a number that is not in `NUMBERS`.
    """
    words = text.split()
    return len(words) >= SHORTEST and _FOLLOWS[rule](text, words, value)


@dataclass
class FollowRuleConfig:
    """The fields that every dataset has. There is nothing to choose."""

    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Accept every value, because QaRL sets both fields."""


class FollowRuleDataset(Dataset):
    """Say something about a subject, and follow a rule of form"""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return problem `index`, from a generator of its own. It has no reference answer."""
        generator = random.Random(self.seed + index)
        rule = generator.choice(list(RULES))
        sentence, values = RULES[rule]
        value = generator.choice(values)
        subject = generator.choice(SUBJECTS)
        return {
            "question": f"Say something about {subject}. {sentence.format(value)}",
            "answer": "",
            "metadata": {"rule": rule, "value": value},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return 1.0 if the answer follows the rule, else 0.0."""
        metadata = entry["metadata"]
        return float(follows(metadata["rule"], metadata["value"], answer or ""))
