"""GRPO on positive samples alone: negative ones, where error tokens gather, give no gradient at all.

    J = mean over responses of mean_t  w_t · min(r_t, 1 + ε_h) · max(A, 0)

One of the QaRL paper's comparisons (arXiv 2604.07853). Negative responses still count where an aggregation divides.
"""

from qarl.configs.schema.objectives import PositiveGrpoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import token_ratio


def positive_grpo(inputs: ObjectiveInput, config: PositiveGrpoConfig) -> ObjectiveResult:
    """-w · surrogate of each token, zero where A ≤ 0."""
    ratio, gain = token_ratio(inputs), inputs.advantages.clamp_min(0.0)
    high = 1.0 + config.clip_high
    return ObjectiveResult(-(inputs.weight * (ratio.clamp_max(high) * gain)), (ratio > high) & (gain > 0))
