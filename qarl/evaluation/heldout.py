"""What a policy's held-out answers come to, and by which of their figures it is judged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heldout:
    """accuracy: share of answers that count as right. reward: their mean, where nothing but rewards
    says which are right (`qarl.tasks.Task.checker`): then it is what the policy is judged by; None
    elsewhere. problems: asked.
    """

    accuracy: float
    reward: float | None = None
    problems: int | None = None

    @property
    def score(self) -> float:
        """The figure that it is judged by."""
        return self.accuracy if self.reward is None else self.reward

    @property
    def name(self) -> str:
        """Of that figure."""
        return "accuracy" if self.reward is None else "mean reward"

    @property
    def figure(self) -> str:
        """As it is shown: "41.2%", or "0.312"."""
        return f"{self.accuracy:.1%}" if self.reward is None else f"{self.reward:.3g}"

    def __str__(self) -> str:
        return self.figure if self.reward is None else f"reward {self.figure}"

    def since(self, before: "Heldout") -> str:
        """What was gained, in words: "+3.1 points", or "+0.25"."""
        gain = self.score - before.score
        return f"{100 * gain:+.1f} points" if self.reward is None else f"{gain:+.3g}"


def heldout(figures: Mapping[str, Any]) -> Heldout | None:
    """Of figures by their names in metrics.jsonl, start.json or qarl.json; None where nothing was
    measured.
    """
    accuracy = figures.get("accuracy", figures.get("heldout_accuracy"))
    return (
        None
        if accuracy is None
        else Heldout(accuracy, *map(figures.get, ("heldout_reward", "heldout_problems")))
    )
