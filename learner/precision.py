"""Dynamic loss scaling for float16 compute."""

from dataclasses import dataclass


@dataclass
class LossScale:
    """Multiplies the loss so that small float16 gradients survive; gradients are divided before the step.

    scale: now. growth_every: good steps after which it doubles; a non-finite step halves it. Inactive (always 1)
    for bfloat16, whose range is float32's.
    """

    active: bool
    scale: float
    growth_every: int
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not self.active:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """Record whether a step's gradients were finite."""
        if not self.active:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == self.growth_every:
            self.scale *= 2
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """scale and good_steps, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a `state_dict`."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])
