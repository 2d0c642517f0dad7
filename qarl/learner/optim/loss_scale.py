"""Dynamic loss scaling for float16 compute, the end of a run whose gradients stay infinite or NaN,
and log-probs that left their dtype's range, found before they are learned from.

float16 ends at 65504. A forward beyond it gives infinity, and NaN from there on; a loss made of
those has no gradient to step with, so the run would skip every update and never say why. The good
case costs one look at the log-probs.
"""

from dataclasses import dataclass

import torch

from qarl.configs.errors import PrecisionError
from qarl.learner.batching import Batch

MOST_SKIPPED = 8
"""Updates that may be skipped in a row where there is no loss scale to lower: two batches of the
default's four.
"""

WIDER_THAN_FLOAT16 = (
    "compute in bfloat16, whose range is float32's (--dtype bfloat16), or in float32 where the"
    " scheme has it (--dtype float32); where learner.compute_dtype is set, there"
)
"""The remedy for what leaves float16's range."""


def short_name(dtype: torch.dtype) -> str:
    """float16 for torch.float16."""
    return str(dtype).removeprefix("torch.")


@dataclass
class LossScale:
    """Multiplies the loss so that small float16 gradients survive; gradients are divided before the
    step.

    scale: now. growth_every: good steps after which it doubles; a non-finite step halves it.
    Inactive (always 1) for bfloat16 and float32, whose range needs none. skipped: non-finite steps
    in a row.
    """

    active: bool
    scale: float = 65536.0
    growth_every: int = 200
    good_steps: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if not self.active:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """Record whether a step's gradients were finite.

        Raises `PrecisionError` where skipping on would not help: not finite at a scale of 1, or,
        inactive, `MOST_SKIPPED` times in a row.
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
                "float16 gradients are infinite or NaN even at a loss scale of 1, after"
                f" {self.skipped} skipped updates in a row; {WIDER_THAN_FLOAT16}; {masters}"
            )
        return (
            f"{self.skipped} updates in a row had infinite or NaN gradients, in a dtype whose range"
            " is float32's: the policy has diverged, or a reward is out of bounds; resume with a"
            f" lower learner.optimizer.lr or learner.optimizer.grad_clip; {masters}"
        )

    def state_dict(self) -> dict[str, float]:
        """scale, good_steps and skipped, for a checkpoint."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over a `state_dict`."""
        self.scale = state["scale"]
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])


def require_finite_logprobs(
    batch: Batch, index: torch.Tensor, logprobs: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raise `PrecisionError` where the forward of the rows at `index` gave log-probs that are not
    finite.

    logprobs: fp32 [B, T-1], of the whole batch. dtype: of the forward.
    """
    wrong = int((~logprobs[index].isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"{short_name(dtype)} forward: the log-probs of {wrong} of"
            f" {int(batch.response_mask[index].sum())} tokens are infinite or NaN."
            f" {_remedy(dtype)}; no step was taken from them"
        )


def require_finite_sampler(batch: Batch, dtype: torch.dtype) -> None:
    """Raise `PrecisionError` where the engine's own log-probs are not finite. dtype: the
    engine's.
    """
    wrong = int((~batch.sampler_logprobs.isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"the engine's log-probs of {wrong} of {int(batch.response_mask.sum())} tokens are"
            f" infinite or NaN. {_remedy(dtype)}; no step was taken from them, the last checkpoint"
            " is intact"
        )


def _remedy(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return f"float16 ends at {torch.finfo(dtype).max:.0f}: {WIDER_THAN_FLOAT16}"
    return (
        f"{short_name(dtype)} has a range of 3e38, so the policy itself has diverged or its weights"
        " are damaged: resume from an earlier checkpoint with a lower learner.optimizer.lr or"
        " learner.optimizer.grad_clip"
    )
