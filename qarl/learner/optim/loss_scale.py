"""Dynamic loss scaling for float16 compute, and checks for infinite or NaN gradients and log-probs.

float16 ends at 65504. A forward beyond it gives infinity, and then NaN. A loss of such log-probs
has no gradient to step with, so a run would skip every update and never say why. Non-finite
log-probs are therefore found before anything is learned from them, and a run whose gradients stay
non-finite ends. When all is well, this costs one look at the log-probs.
"""

from dataclasses import dataclass

import torch

from qarl.configs.errors import PrecisionError
from qarl.learner.batching import Batch

MOST_SKIPPED = 8
"""Upper limit of updates skipped in a row if there is no loss scale to lower: two batches of the
default's four updates.
"""

WIDER_THAN_FLOAT16 = (
    "compute in bfloat16, whose range is float32's (--dtype bfloat16), or in float32 where the"
    " scheme has it (--dtype float32); where learner.compute_dtype is set, there"
)
"""The remedy, in words, for values beyond float16's range."""


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", such as float16."""
    return str(dtype).removeprefix("torch.")


@dataclass
class LossScale:
    """Factor of the loss, so that small float16 gradients survive.

    Gradients are divided by it before the step.
    """

    active: bool
    """Whether scaling is on. It is off for bfloat16 and float32, whose range needs none."""
    scale: float = 65536.0
    """The present factor; always 1 if scaling is off."""
    growth_every: int = 200
    """Number of good steps after which the factor doubles. A non-finite step halves it."""
    good_steps: int = 0
    """Number of good steps since the factor last changed."""
    skipped: int = 0
    """Number of non-finite steps in a row."""

    def __post_init__(self) -> None:
        if not self.active:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """Record whether a step's gradients were finite.

        Raises `PrecisionError` if skipping more steps would not help: if gradients are not finite
        at a scale of 1 or, with scaling off, `MOST_SKIPPED` times in a row.
        """
        self.skipped = 0 if finite else self.skipped + 1
        hopeless = self.scale <= 1.0 if self.active else self.skipped >= MOST_SKIPPED
        if hopeless and not finite:
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
        """Return the message of the error that ends the run."""
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
        """Return scale, good_steps and skipped, for a checkpoint."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self.scale = state["scale"]
        self.good_steps = int(state["good_steps"])
        self.skipped = int(state["skipped"])


def require_finite_logprobs(
    batch: Batch, index: torch.Tensor, logprobs: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raise `PrecisionError` if a forward gave log-probs that are not finite.

    index: the rows of the forward. logprobs: fp32 [B, T-1], of the whole batch. dtype: that of the
    forward.
    """
    wrong = int((~logprobs[index].isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"{short_name(dtype)} forward: the log-probs of {wrong} of"
            f" {int(batch.response_mask[index].sum())} tokens are infinite or NaN."
            f" {_remedy(dtype)}; no step was taken from them"
        )


def require_finite_sampler(batch: Batch, dtype: torch.dtype) -> None:
    """Raise `PrecisionError` if the engine's own log-probs are not finite.

    dtype: that of the engine.
    """
    wrong = int((~batch.sampler_logprobs.isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"the engine's log-probs of {wrong} of {int(batch.response_mask.sum())} tokens are"
            f" infinite or NaN. {_remedy(dtype)}; no step was taken from them, the last checkpoint"
            " is intact"
        )


def require_finite_scores(
    logprobs: torch.Tensor, mask: torch.Tensor, what: str, dtype: torch.dtype
) -> None:
    """Raise `PrecisionError` if log-probs that prove something are not finite.

    Args:
        logprobs: fp32 [B, T-1].
        mask: bool [B, T-1], the tokens that count.
        what: words for whose log-probs of what they are.
        dtype: that of the forward.
    """
    wrong = int((~logprobs[mask].isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"{what}: the log-probs of {wrong} of {int(mask.sum())} tokens are infinite or NaN in"
            f" {short_name(dtype)}. {_remedy(dtype)}; nothing was learned from them"
        )


def _remedy(dtype: torch.dtype) -> str:
    """Return what a user can do about non-finite log-probs, in words."""
    if dtype == torch.float16:
        return f"float16 ends at {torch.finfo(dtype).max:.0f}: {WIDER_THAN_FLOAT16}"
    return (
        f"{short_name(dtype)} has a range of 3e38, so the policy itself has diverged or its weights"
        " are damaged: resume from an earlier checkpoint with a lower learner.optimizer.lr or"
        " learner.optimizer.grad_clip"
    )
