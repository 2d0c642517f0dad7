"""TBPO, trust-band policy optimization (QaRL, arXiv 2604.07853).

    r  = exp(mean_t(log π_cur - log π_old))          both the learner's: a proximal ratio
    w̃  = clip(exp(mean_t(log π_old - log π_sampler)), 1/c, c)
    r̃  = clip(r, 0, 1 + ε_h)            where A ≥ 0
         clip(r, 1 - δ_l, 1 + δ_h)      where A < 0
    J  = mean over responses of w̃ · r̃ · A,  shared by the response's tokens

Clipping is on the ratio itself, not on the minimum of two surrogates, so a negative sample that has left the
band on either side gives no gradient: error tokens cannot be pushed without bound.
"""

import torch

from learner.corrections import sequence_log_ratio, sequence_mismatch_weight
from learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.config import ObjectiveConfig


def tbpo(given: ObjectiveInput, config: ObjectiveConfig) -> ObjectiveResult:
    """Per-sequence TBPO loss -w̃ · r̃ · A."""
    log_ratio = sequence_log_ratio(given.current, given.old, given.response)
    ratio = log_ratio.exp()
    positive = given.advantages >= 0
    low = torch.where(positive, 0.0, 1.0 - config.delta_low)
    high = torch.where(positive, 1.0 + config.epsilon_high, 1.0 + config.delta_high)
    banded = torch.minimum(torch.maximum(ratio, low), high)
    log_w = sequence_log_ratio(given.old, given.sampler, given.response)
    weight = sequence_mismatch_weight(log_w, config.mismatch_cap)
    clipped = ((ratio < low) | (ratio > high)).float()
    return ObjectiveResult(-weight * banded * given.advantages, clipped, log_ratio.detach())
