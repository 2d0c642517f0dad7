"""Base of QaRL's own datasets, with the interface of reasoning-gym's `ProceduralDataset`.

A task of QaRL's own thus starts without reasoning-gym, whose import brings sympy and matplotlib and
takes seconds.
"""

from typing import Any


class Dataset:
    """A list of problems without end: problem k is a pure function of the seed and k."""

    def __init__(self, config: Any) -> None:
        """Validate and keep the configuration, a dataclass with the fields `seed` and `size`."""
        config.validate()
        self.config = config
        self.seed: int = config.seed
        self.size: int = config.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return problem `index`: "question", "answer" and "metadata"."""
        raise NotImplementedError

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return the score of an answer to the problem `entry`, in [0, 1]."""
        raise NotImplementedError
