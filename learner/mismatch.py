"""How far two policies' log-probs of the same tokens are apart.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass

import torch

from learner.objectives.ratios import sequence_log_ratio


@dataclass(frozen=True)
class Mismatch:
    """Over the response tokens of a batch, in nats. mean_abs, max_abs: of log π_learner - log π_sampler. equal: share
    of the tokens where that is zero, to the last bit. k3: mean of exp(d) - 1 - d with d that difference, an unbiased
    estimate of KL(sampler ‖ learner). mean_log_w, mean_abs_log_w, log_w_low, log_w_high: of the sequences' log mismatch
    weights (token means)."""

    mean_abs: float
    max_abs: float
    equal: float
    k3: float
    mean_log_w: float
    mean_abs_log_w: float
    log_w_low: float
    log_w_high: float


def measure_mismatch(learner: torch.Tensor, sampler: torch.Tensor, response_mask: torch.Tensor) -> Mismatch:
    """learner, sampler: fp32 [B, T-1]; response_mask: bool [B, T-1] with at least one True."""
    difference = (learner - sampler)[response_mask].double()
    log_w = sequence_log_ratio(learner, sampler, response_mask)
    k3 = (difference.expm1() - difference).mean()
    return Mismatch(
        mean_abs=float(difference.abs().mean()),
        max_abs=float(difference.abs().max()),
        equal=float((difference == 0).double().mean()),
        k3=float(k3),
        mean_log_w=float(log_w.mean()),
        mean_abs_log_w=float(log_w.abs().mean()),
        log_w_low=float(log_w.min()),
        log_w_high=float(log_w.max()),
    )
