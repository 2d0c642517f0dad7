"""What the loss made of each token. Axes: B sequences, T tokens, of which T-1 are predicted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.learner.loss.aggregation import is_shared
from qarl.learner.objectives.ratios import sequence_mean


@dataclass(frozen=True)
class LossTokens:
    """Without gradient, [B, T-1]. log_ratio: log π_cur - log π_proximal, fp32. clip: place in
    `CLIP_REASONS`, int32.
    """

    log_ratio: Tensor
    clip: Tensor


def clip_reasons(
    log_ratio: Tensor,
    clipped: Tensor,
    corrected: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """Places in `CLIP_REASONS`, int32 [B, T-1]. log_ratio, advantages: fp32, response_mask: bool
    [B, T-1]. clipped, corrected: the objective's bound was reached, the mismatch weight was capped
    or masked; bool, of each token [B, T-1] or of each sequence [B, 1]. A token without advantage
    has no gradient to lose: none.
    """
    sequence = is_shared(clipped, response_mask)
    signed = sequence_mean(log_ratio, response_mask)[:, None] if sequence else log_ratio
    place = 1 + 4 * int(sequence) + 2 * (advantages < 0).int() + (signed < 0).int()
    other = torch.where(corrected, len(CLIP_REASONS) - 1, 0)
    reasons = torch.where(clipped & (advantages != 0), place, other)
    return (reasons * response_mask).int()


def clipped_sides(reasons: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens' ratio, or whose sequence's, is beyond the bound: A > 0 above, A < 0 above, A <
    0 below; bool [B, T-1] each. reasons: as `clip_reasons` returns them.
    """
    sides = ("A > 0 above", "A < 0 above", "A < 0 below")
    places = ((CLIP_REASONS.index(side), CLIP_REASONS.index(f"sequence, {side}")) for side in sides)
    above_positive, above_negative, below_negative = (
        (reasons == a) | (reasons == b) for a, b in places
    )
    return above_positive, above_negative, below_negative
