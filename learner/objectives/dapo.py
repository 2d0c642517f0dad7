"""DAPO's clip-higher: the upper bound is wider than the lower, so that unlikely tokens can still rise.

    J = Σ_b Σ_t w_t · min(r_t · A, clip(r_t, 1 - ε_l, 1 + ε_h) · A) / Σ_b T_b,   ε_h > ε_l

Source: DAPO (arXiv 2503.14476, eq. 10 for the bounds, eq. 8 for the mean over all tokens, which is this objective's
default aggregation). Its dynamic sampling is `rollout.dynamic_sampling`.
"""

from qarl.configs.schema.objectives import DapoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import clipped_surrogate, token_ratio


def dapo(inputs: ObjectiveInput, config: DapoConfig) -> ObjectiveResult:
    """-w · surrogate of each token."""
    ratio, advantages = token_ratio(inputs), inputs.advantages
    surrogate, clipped = clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high)
    return ObjectiveResult(-(inputs.weight * surrogate), clipped)
