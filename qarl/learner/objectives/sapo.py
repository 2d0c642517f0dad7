"""SAPO: a sigmoid gate around r = 1 instead of a clip.

    f(r) = 4/τ · σ(τ (r - 1)),  τ = τ_pos if A > 0, else τ_neg
    J    = mean over responses of mean_t  w_t · f(r_t) · A

f'(r) = 4 σ (1 - σ) is 1 at r = 1 and falls off on both sides, faster for negative samples (τ_neg >
τ_pos). Source: SAPO (arXiv 2511.20347).
"""

import torch

from qarl.configs.schema.objectives import SapoConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.ratios import token_ratio


def sapo(inputs: ObjectiveInput, config: SapoConfig) -> ObjectiveResult:
    """Return -w · f(r) · A of each token. Nothing is ever clipped."""
    ratio = token_ratio(inputs)
    advantages = inputs.advantages
    tau = torch.full_like(advantages, config.tau_negative)
    tau = tau.masked_fill(advantages > 0, config.tau_positive)
    gate = (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)
    loss = -(inputs.weight * (gate * advantages))
    return ObjectiveResult(loss, torch.zeros_like(inputs.response_mask))
