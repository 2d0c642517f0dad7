"""PPO's pessimistic clip, on any ratio. Source: PPO (arXiv 1707.06347, eq. 7); dual clip (arXiv 1912.09729)."""

import torch

from learner.objectives.base import ObjectiveInput
from learner.objectives.ratios import sequence_log_ratio


def token_ratio(given: ObjectiveInput) -> torch.Tensor:
    """π_cur / π_proximal of each token, fp32 [B, T]."""
    return (given.current - given.proximal).exp()


def sequence_ratio(given: ObjectiveInput) -> torch.Tensor:
    """exp(mean_t(log π_cur - log π_proximal)), fp32 [B, 1] (GSPO, arXiv 2507.18071, eq. 7)."""
    return sequence_log_ratio(given.current, given.proximal, given.response)[:, None].exp()


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, 1 - low, 1 + high) A), and where the clip decided, bool.

    ratio: fp32 [B, T] or [B, 1]; advantages: fp32 [B, 1]. Both results have the ratio's shape.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(plain, bounded), bounded < plain


def dual_clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(min(r A, clip(r) A), c A) for negative advantages, the plain clip for the others; shapes as above.

    PPO's minimum leaves a negative sample's ratio unbounded above; c bounds it.
    """
    surrogate, clipped = clipped_surrogate(ratio, advantages, low, high)
    floor = dual * advantages
    negative = advantages < 0
    cut = negative & (surrogate < floor)
    return torch.where(cut, floor, surrogate), clipped | cut
