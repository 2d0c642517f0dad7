"""GRPO with a token ratio and token-level truncated importance sampling, the baseline.

    r_t = π_cur / π_old,   w_t = min(π_old / π_sampler, c)
    J   = mean over responses of mean_t  w_t · min(r_t · A, clip(r_t, 1 - ε_l, 1 + ε_h) · A)

Source: GRPO (arXiv 2402.03300, eq. 3); TIS as in "Your efficient RL framework secretly brings you off-policy
RL training" (Yao et al., 2025).
"""

import torch

from learner.corrections import sequence_log_ratio, sequence_mean, token_mismatch_weight
from learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.config import ObjectiveConfig


def grpo(given: ObjectiveInput, config: ObjectiveConfig) -> ObjectiveResult:
    """Per-sequence GRPO loss, tokens averaged within a response."""
    ratio = (given.current - given.old).exp()
    advantages = given.advantages[:, None]
    clipped_ratio = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    weight = token_mismatch_weight((given.old - given.sampler) * given.response, config.mismatch_cap)
    cut = (clipped_ratio * advantages < ratio * advantages).float()
    return ObjectiveResult(
        -sequence_mean(weight * surrogate, given.response),
        sequence_mean(cut, given.response),
        sequence_log_ratio(given.current, given.old, given.response).detach(),
    )
