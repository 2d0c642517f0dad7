"""Means and ratios over responses. Axes: B sequences, T tokens."""

import torch


def sequence_mean(values: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Mean over each response's tokens. values: fp32 [B, T]; response: bool [B, T] → fp32 [B]."""
    return (values * response).sum(-1) / response.sum(-1).clamp_min(1)


def sequence_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """mean_t(log numerator - log denominator) of each response, fp32 [B]: the log of a geometric-mean ratio."""
    return sequence_mean(numerator - denominator, response)


def score(logprobs: torch.Tensor) -> torch.Tensor:
    """Exactly 1, with the gradient of the log-probs: x.detach() · score(log π) is REINFORCE's estimator, x ∇log π."""
    return 1.0 + (logprobs - logprobs.detach())
