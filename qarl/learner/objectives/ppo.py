"""PPO's clipped objective, with its variants.

The ratio is that of a token (GRPO, DAPO) or of a sequence (GSPO). Variants have a second clip for
negative samples, or use positive samples alone.

    r_t = π_cur / π_proximal,   s = exp(mean_t(log π_cur - log π_proximal))
    J   = mean over responses of w · min(r · A, clip(r, 1 - ε_l, 1 + ε_h) · A),
          r = r_t, in the mean over t, or r = s
"""

from qarl.configs.schema.objectives import (
    DualClipConfig,
    GrpoConfig,
    GspoConfig,
    GspoDualClipConfig,
    PositiveGrpoConfig,
)
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.ratios import (
    clipped_surrogate,
    sequence_advantages,
    sequence_ratio,
    token_ratio,
)


def grpo(inputs: ObjectiveInput, config: GrpoConfig) -> ObjectiveResult:
    """Return -w · surrogate of each token. Source: GRPO (arXiv 2402.03300, eq. 3).

    DAPO (arXiv 2503.14476) is the same function with other defaults in its section: ε_h > ε_l
    (clip-higher, eq. 10), so that unlikely tokens can still rise, and the mean over all tokens (eq.
    8). Its dynamic sampling is `rollout.dynamic_sampling`.
    """
    return clipped_surrogate(inputs, token_ratio(inputs), inputs.advantages, config)


def dual_clip(inputs: ObjectiveInput, config: DualClipConfig) -> ObjectiveResult:
    """Return -w · surrogate of each token, with a second clip for negative samples.

    If A < 0 the surrogate is the larger of GRPO's and c · A, so a negative sample's ratio is
    bounded above as well. Source: Ye et al. (arXiv 1912.09729; c = 3).
    """
    return clipped_surrogate(
        inputs, token_ratio(inputs), inputs.advantages, config, config.dual_clip
    )


def gspo(inputs: ObjectiveInput, config: GspoConfig) -> ObjectiveResult:
    """Return -w · surrogate of each sequence.

    Source: GSPO (arXiv 2507.18071, eq. 5 and 7; bounds of section 5.1).
    """
    return clipped_surrogate(inputs, sequence_ratio(inputs), sequence_advantages(inputs), config)


def gspo_dual_clip(inputs: ObjectiveInput, config: GspoDualClipConfig) -> ObjectiveResult:
    """Return -w · surrogate of each sequence with dual clip, as in frameworks that offer both.

    If A < 0 it is clip(s, 1 - ε_l, c) A. With ε_l = δ_l, ε_h equal and c = 1 + δ_h that is TBPO's
    band; with the usual c = 3 it is not.
    """
    return clipped_surrogate(
        inputs,
        sequence_ratio(inputs),
        sequence_advantages(inputs),
        config,
        config.dual_clip,
    )


def positive_grpo(inputs: ObjectiveInput, config: PositiveGrpoConfig) -> ObjectiveResult:
    """Return -w · min(r_t, 1 + ε_h) · max(A, 0) of each token.

    Negative samples, in which error tokens accumulate, give no gradient. They still count in the
    denominator of an aggregation. This is one of the QaRL paper's comparisons (arXiv 2604.07853).
    """
    ratio = token_ratio(inputs)
    gain = inputs.advantages.clamp_min(0.0)
    high = 1.0 + config.clip_high
    surrogate = ratio.clamp_max(high) * gain
    return ObjectiveResult(-(inputs.weight * surrogate), (ratio > high) & (gain > 0))
