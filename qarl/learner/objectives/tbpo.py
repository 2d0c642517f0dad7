"""TBPO, trust-band policy optimization (QaRL, arXiv 2604.07853).

    r  = exp(mean_t(log π_cur - log π_proximal))
    r̃  = clip(r, 0, 1 + ε_h)            if A ≥ 0
         clip(r, 1 - δ_l, 1 + δ_h)      if A < 0
    J  = mean over responses of w̃ · r̃ · A,  shared by the response's tokens

The paper's w̃ is the `geometric` correction, this objective's default. The clip is on the ratio
itself, not on the minimum of two surrogates. So a negative sample that has left the band on either
side gives no gradient, and error tokens cannot be pushed without bound. `gspo_dual_clip` with c = 1
+ δ_h is the same function (docs/reference/objectives.md).
"""

import torch

from qarl.configs.schema.objectives import TbpoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.ratios import sequence_advantages, sequence_ratio


def tbpo(inputs: ObjectiveInput, config: TbpoConfig) -> ObjectiveResult:
    """Return -w · r̃ · A of each sequence."""
    advantages = sequence_advantages(inputs)
    ratio = sequence_ratio(inputs)
    positive = advantages >= 0
    low = torch.where(positive, 0.0, 1.0 - config.delta_low)
    high = torch.where(positive, 1.0 + config.epsilon_high, 1.0 + config.delta_high)
    banded = torch.minimum(torch.maximum(ratio, low), high)
    loss = -inputs.weight * banded * advantages
    return ObjectiveResult(loss, (ratio < low) | (ratio > high))
