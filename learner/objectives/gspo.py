"""GSPO: one ratio a sequence, the geometric mean of its tokens' ratios.

    s = exp(mean_t(log π_cur - log π_proximal))
    J = mean over responses of w · min(s · A, clip(s, 1 - ε_l, 1 + ε_h) · A)

Source: GSPO (arXiv 2507.18071, eq. 5 and 7; bounds of section 5.1).
"""

from qarl.configs.schema.objectives import GspoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import clipped_surrogate, sequence_advantages, sequence_ratio


def gspo(inputs: ObjectiveInput, config: GspoConfig) -> ObjectiveResult:
    """-w · surrogate of each sequence."""
    ratio, advantages = sequence_ratio(inputs), sequence_advantages(inputs)
    surrogate, clipped = clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high)
    return ObjectiveResult(-(inputs.weight * surrogate), clipped)
