"""Held-out accuracy and reward of a policy, and which of the two it is judged by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heldout:
    """Held-out figures of a policy."""

    accuracy: float
    """Fraction of answers that count as right."""
    reward: float | None = None
    """Mean reward if the task has no checker (`qarl.tasks.Task.checker`), so that only rewards say
    which answers are right; the policy is judged by it then. Otherwise None.
    """
    problems: int | None = None
    """Number of problems asked."""

    @property
    def score(self) -> float:
        """The figure that the policy is judged by."""
        return self.accuracy if self.reward is None else self.reward

    @property
    def name(self) -> str:
        """Name of that figure."""
        return "accuracy" if self.reward is None else "mean reward"

    @property
    def figure(self) -> str:
        """The figure as text: "41.2%", or "0.312"."""
        return f"{self.accuracy:.1%}" if self.reward is None else f"{self.reward:.3g}"

    def __str__(self) -> str:
        return self.figure if self.reward is None else f"reward {self.figure}"

    def since(self, before: "Heldout") -> str:
        """Return the gain since `before` as text: "+3.1 points", or "+0.25"."""
        gain = self.score - before.score
        return f"{100 * gain:+.1f} points" if self.reward is None else f"{gain:+.3g}"


def heldout(figures: Mapping[str, Any]) -> Heldout | None:
    """Return held-out figures by their names in metrics.jsonl, start.json or qarl.json.

    None if nothing was measured.
    """
    accuracy = figures.get("accuracy", figures.get("heldout_accuracy"))
    if accuracy is None:
        return None
    return Heldout(accuracy, figures.get("heldout_reward"), figures.get("heldout_problems"))
