"""A reward that costs nothing to import, because it runs in its own process."""

from typing import Any


def reward(problem: Any, text: str) -> float:
    """Return numbers that differ from text to text."""
    return float(sum(map(ord, text)) % 7)
