"""A reward that costs nothing to import: it runs in a process of its own."""

from typing import Any


def reward(problem: Any, text: str) -> float:
    """Numbers that differ from text to text."""
    return float(sum(map(ord, text)) % 7)
