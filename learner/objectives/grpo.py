"""GRPO with a token ratio, the baseline.

    r_t = π_cur / π_proximal
    J   = mean over responses of mean_t  w_t · min(r_t · A, clip(r_t, 1 - ε_l, 1 + ε_h) · A)

Source: GRPO (arXiv 2402.03300, eq. 3).

DAPO (arXiv 2503.14476) is the same function: ε_h > ε_l (clip-higher, eq. 10), so that unlikely tokens can still rise,
and the mean over all tokens (eq. 8) are defaults of its section. Its dynamic sampling is `rollout.dynamic_sampling`.
"""

from qarl.configs.schema.objectives import DapoConfig, GrpoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.clipping import clipped_surrogate, token_ratio


def grpo(inputs: ObjectiveInput, config: GrpoConfig | DapoConfig) -> ObjectiveResult:
    """-w · surrogate of each token."""
    ratio, advantages = token_ratio(inputs), inputs.advantages
    surrogate, clipped = clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high)
    return ObjectiveResult(-(inputs.weight * surrogate), clipped)
