"""Means and ratios over responses. Axes: B sequences, T tokens, of which T-1 are predicted."""

import torch


def sequence_mean(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Mean over each response's tokens. values: fp32 [B, T-1]; response_mask: bool [B, T-1] → fp32 [B]."""
    return (values * response_mask).sum(-1) / response_mask.sum(-1).clamp_min(1)


def sequence_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """mean_t(log numerator - log denominator) of each response, fp32 [B]: the log of a geometric-mean ratio."""
    return sequence_mean(numerator - denominator, response_mask)


def shadowed(current: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """The shadow's values with `current`'s gradient, fp32 [B, T-1] (`learner.ratio_fix`). shadow: without gradient."""
    return shadow + (current - current.detach())


def score(logprobs: torch.Tensor) -> torch.Tensor:
    """Exactly 1, with the gradient of the log-probs: x.detach() · score(log π) is REINFORCE's estimator, x ∇log π."""
    return 1.0 + (logprobs - logprobs.detach())
