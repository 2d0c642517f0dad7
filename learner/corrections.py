"""Mismatch weights: how far the learner's old policy is from the sampler that drew the tokens.

Axes: B sequences, T tokens.
"""

import torch


def sequence_mean(values: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Mean over each response's tokens. values: fp32 [B, T]; response: bool [B, T] → fp32 [B]."""
    return (values * response).sum(-1) / response.sum(-1).clamp_min(1)


def sequence_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """mean_t(log numerator - log denominator) of each response, fp32 [B]: the log of a geometric-mean ratio."""
    return sequence_mean(numerator - denominator, response)


def sequence_mismatch_weight(log_w: torch.Tensor, cap: float) -> torch.Tensor:
    """w̃ = clip(exp(log_w), 1/cap, cap) (QaRL's two-sided cap). log_w: fp32 [B] → fp32 [B]."""
    return log_w.exp().clamp(1.0 / cap, cap)


def token_mismatch_weight(log_w: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling per token: min(exp(log_w), cap). log_w: fp32 [B, T] → fp32 [B, T]."""
    return log_w.exp().clamp_max(cap)
