"""Rewards of the comparison on real text (docs/lab/real.md), for `--reward` and `--task.correct`.

Each takes a problem and the text of an answer. Rewards are from 0 to 1; an answer is correct at 1.
"""

import re
from difflib import SequenceMatcher
from typing import Any

from qarl.tasks.follow_rule import follows


def words_in_order(problem: Any, text: str) -> float:
    """Return the similarity of the answer's words and the expected words, in order: 1 if equal.

    The measure is `SequenceMatcher.ratio` over words, so a list that is partly reversed earns a
    part.
    """
    return SequenceMatcher(None, _words(text), _words(problem.answer), autojunk=False).ratio()


def all_words_in_order(problem: Any, text: str) -> bool:
    """Return whether the answer is the expected list of words and nothing else."""
    return _words(text) == _words(problem.answer)


def _words(text: str) -> list[str]:
    """Return the words of a list, without the commas and full stops between them."""
    return re.findall(r"[^\s,.]+", text)


def last_number(problem: Any, text: str) -> float:
    """Return 1.0 when the last whole number of the answer is the expected one, else 0.0."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(numbers) and int(numbers[-1]) == int(problem.answer))


def last_number_correct(problem: Any, text: str) -> bool:
    """Return whether the last whole number of the answer is the expected one."""
    return last_number(problem, text) == 1.0


def obeys_rule(problem: Any, text: str) -> float:
    """Return 1.0 when the answer obeys the rule of its question (rules.py), else 0.0."""
    return float(follows(problem.metadata["rule"], problem.answer, text))


def obeyed(problem: Any, text: str) -> bool:
    """Return whether the answer obeys the rule of its question."""
    return obeys_rule(problem, text) == 1.0


def shortness(problem: Any, text: str, token_ids: list[int]) -> float:
    """Return minus the number of the answer's tokens.

    This is the reward under which a precision gap was reported to matter.
    """
    del problem, text
    return -float(len(token_ids))
