"""Values that the loss computes for each token.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.learner.loss.aggregation import is_per_sequence
from qarl.learner.objectives.ratios import sequence_mean


@dataclass(frozen=True)
class LossTokens:
    """Values of each token of a micro-batch, without gradient."""

    log_ratio: Tensor
    """log π_cur - log π_proximal, fp32 [B, T-1]."""
    clip: Tensor
    """Index in `CLIP_REASONS`, int32 [B, T-1]."""


def clip_reasons(
    log_ratio: Tensor,
    clipped: Tensor,
    corrected: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """Return each token's index in `CLIP_REASONS`, int32 [B, T-1].

    A token without advantage has no gradient to lose, so its reason is none, unless its weight was
    corrected.

    Args:
        log_ratio: fp32 [B, T-1].
        clipped: whether the objective's bound was reached, bool, of each token [B, T-1] or of each
            sequence [B, 1].
        corrected: whether the mismatch weight was capped or masked, bool, same shapes.
        advantages: fp32 [B, T-1].
        response_mask: bool [B, T-1].
    """
    sequence = is_per_sequence(clipped, response_mask)
    signed = sequence_mean(log_ratio, response_mask)[:, None] if sequence else log_ratio
    # The order of CLIP_REASONS: none, the eight clips (by kind, sign and side), corrected.
    clip = 1 + 4 * int(sequence) + 2 * (advantages < 0).int() + (signed < 0).int()
    unclipped = torch.where(corrected, len(CLIP_REASONS) - 1, 0)
    reasons = torch.where(clipped & (advantages != 0), clip, unclipped)
    return (reasons * response_mask).int()


def clipped_sides(reasons: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens were clipped on each side, bool [B, T-1] each.

    The sides are A > 0 above, A < 0 above and A < 0 below. A token counts as clipped if its own
    ratio is beyond the bound, or its sequence's.

    reasons: as `clip_reasons` returns them.
    """
    return (
        _is_clipped(reasons, "A > 0 above"),
        _is_clipped(reasons, "A < 0 above"),
        _is_clipped(reasons, "A < 0 below"),
    )


def _is_clipped(reasons: Tensor, side: str) -> Tensor:
    """Return which tokens were clipped on that side, themselves or as a sequence, bool [B, T-1]."""
    of_token = CLIP_REASONS.index(side)
    of_sequence = CLIP_REASONS.index(f"sequence, {side}")
    return (reasons == of_token) | (reasons == of_sequence)
