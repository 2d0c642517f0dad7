"""Token dual-clip PPO: a negative sample's ratio is bounded above as well.

    J_t = w_t · max(min(r_t · A, clip(r_t, 1 - ε_l, 1 + ε_h) · A), c · A)   where A < 0, the plain clip elsewhere

Source: Ye et al. (arXiv 1912.09729; c = 3).
"""

from qarl.configs.schema.objectives import DualClipConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import dual_clipped_surrogate, token_ratio


def dual_clip(inputs: ObjectiveInput, config: DualClipConfig) -> ObjectiveResult:
    """-w · surrogate of each token."""
    ratio, advantages = token_ratio(inputs), inputs.advantages
    surrogate, clipped = dual_clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    return ObjectiveResult(-(inputs.weight * surrogate), clipped)
