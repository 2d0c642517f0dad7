"""Dynamic loss scaling for float16 compute, and the end of a run whose gradients stay infinite or NaN."""

from dataclasses import dataclass

import torch

from qarl.configs.errors import PrecisionError

MOST_SKIPPED = 8
"""Updates that may be skipped in a row where there is no loss scale to lower: two batches of the default's four."""

WIDER_THAN_FLOAT16 = (
    "compute in bfloat16, whose range is float32's (--dtype bfloat16), or in float32 where the scheme has it (--dtype "
    "float32); where learner.compute_dtype is set, there"
)
"""The remedy for what leaves float16's range."""


def short_name(dtype: torch.dtype) -> str:
    """float16 for torch.float16."""
    return str(dtype).removeprefix("torch.")


@dataclass
class LossScale:
    """Multiplies the loss so that small float16 gradients survive; gradients are divided before the step.

    scale: now. growth_every: good steps after which it doubles; a non-finite step halves it. Inactive (always 1)
    for bfloat16 and float32, whose range needs none. skipped: non-finite steps in a row.
    """

    active: bool
    scale: float
    growth_every: int = 200
    good_steps: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if not self.active:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """Record whether a step's gradients were finite.

        Raises `PrecisionError` where skipping on would not help: not finite at a scale of 1, or, inactive,
        `MOST_SKIPPED` times in a row.
        """
        self.skipped = 0 if finite else self.skipped + 1
        if not finite and (self.scale <= 1.0 if self.active else self.skipped >= MOST_SKIPPED):
            raise PrecisionError(self._hopeless())
        if not self.active:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps == self.growth_every:
            self.scale *= 2
            self.good_steps = 0

    def _hopeless(self) -> str:
        masters = "the masters are those before the first of them"
        if self.active:
            return (
                f"float16 gradients are infinite or NaN even at a loss scale of 1, after {self.skipped} skipped "
                f"updates in a row; {WIDER_THAN_FLOAT16}; {masters}"
            )
        return (
            f"{self.skipped} updates in a row had infinite or NaN gradients, in a dtype whose range is float32's: the "
            "policy has diverged, or a reward is out of bounds; resume with a lower learner.optimizer.lr or "
            f"learner.optimizer.grad_clip; {masters}"
        )

    def state_dict(self) -> dict[str, float]:
        """scale, good_steps and skipped, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a `state_dict`."""
        self.scale = state["scale"]
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])
