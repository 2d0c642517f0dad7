"""GSPO with dual clip, as frameworks that have both can be set up.

    J = mean over responses of w · max(min(s · A, clip(s, 1 - ε_l, 1 + ε_h) · A), c · A)   where A < 0; GSPO elsewhere

Source: GSPO (arXiv 2507.18071, eq. 5) and dual clip (arXiv 1912.09729). For A < 0 this is clip(s, 1 - ε_l, c) A:
with ε_l = δ_l, ε_h equal and c = 1 + δ_h it is TBPO's band; with the usual c = 3 it is not.
"""

from qarl.configs.schema.objectives import GspoDualClipConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import dual_clipped_surrogate, sequence_advantages, sequence_ratio


def gspo_dual_clip(inputs: ObjectiveInput, config: GspoDualClipConfig) -> ObjectiveResult:
    """-w · surrogate of each sequence."""
    ratio, advantages = sequence_ratio(inputs), sequence_advantages(inputs)
    surrogate, clipped = dual_clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    return ObjectiveResult(-(inputs.weight * surrogate), clipped)
