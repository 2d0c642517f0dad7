"""Numbers that left their dtype's range, found before they are learned from.

float16 ends at 65504. A forward beyond it gives infinity, and NaN from there on; a loss made of those has no gradient
to step with, so the run would skip every update and never say why. The good case costs one look at the log-probs.
"""

import torch

from qarl.learner.batching import Batch
from qarl.learner.optim.loss_scale import WIDER_THAN_FLOAT16, PrecisionError, short_name


def require_finite_logprobs(batch: Batch, index: torch.Tensor, logprobs: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `PrecisionError` where the forward of the rows at `index` gave log-probs that are not finite.

    logprobs: fp32 [B, T-1], of the whole batch. dtype: of the forward.
    """
    wrong = int((~logprobs[index].isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"{short_name(dtype)} forward: the log-probs of {wrong} of {int(batch.response_mask[index].sum())} tokens "
            f"are infinite or NaN. {_remedy(dtype)}; no step was taken from them"
        )


def require_finite_sampler(batch: Batch, dtype: torch.dtype) -> None:
    """Raise `PrecisionError` where the engine's own log-probs are not finite. dtype: the engine's."""
    wrong = int((~batch.sampler_logprobs.isfinite()).sum())
    if wrong:
        raise PrecisionError(
            f"the engine's log-probs of {wrong} of {int(batch.response_mask.sum())} tokens are infinite or NaN. "
            f"{_remedy(dtype)}; no step was taken from them, the last checkpoint is intact"
        )


def _remedy(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return f"float16 ends at {torch.finfo(dtype).max:.0f}: {WIDER_THAN_FLOAT16}"
    return (
        f"{short_name(dtype)} has a range of 3e38, so the policy itself has diverged or its weights are damaged: "
        "resume from an earlier checkpoint with a lower learner.optimizer.lr or learner.optimizer.grad_clip"
    )
