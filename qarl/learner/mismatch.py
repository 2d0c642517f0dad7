"""The difference between two policies' log-probs of the same tokens: its size, and where it occurs.

Axes: B sequences, T tokens, of which T-1 are predicted; n response tokens of all sequences.
"""

import math
from dataclasses import dataclass

import torch

from qarl.learner.objectives.ratios import sequence_log_ratio

RARE = 0.01
"""Tokens to which the sampler gave a lower probability than this count as rare."""


@dataclass(frozen=True)
class Mismatch:
    """Statistics of d = log π_learner - log π_sampler over a batch's response tokens, in nats."""

    mean_abs: float
    """Mean |d|, nats a token."""
    max_abs: float
    """Largest |d|, nats."""
    equal: float
    """Fraction of the tokens whose d is zero to the last bit."""
    k3: float
    """Mean of exp(d) - 1 - d, an unbiased estimate of KL(sampler ‖ learner), nats a token."""
    mean_log_w: float
    """Mean over the sequences of log w, a sequence's log mismatch weight: the mean d of its tokens.
    """
    mean_abs_log_w: float
    """Mean |log w| over the sequences."""
    log_w_low: float
    """Lowest log w of a sequence."""
    log_w_high: float
    """Highest log w of a sequence."""
    mean: float
    """Mean of d, with its sign."""
    std: float
    """Standard deviation of d."""
    off_10: float
    """Fraction of the tokens whose ratio exp(d) differs from 1 by more than 10 %."""
    off_50: float
    """Fraction of the tokens whose ratio exp(d) differs from 1 by more than 50 %."""
    advantage_correlation: float | None
    """Pearson correlation of d with the advantage; None if no advantages are given or either is
    constant.
    """
    rare_mean_abs: float | None
    """Mean |d| of the tokens to which the sampler gave less than `RARE`; None if there is no such
    token.
    """
    end_mean_abs: float | None
    """Mean |d| of end tokens; None if there are none, or if it is unknown which tokens those are.
    """
    position_slope: float | None
    """Slope of the least-squares line of |d| over the position in the response, nats a token; None
    if all positions are equal.
    """
    length_slope: float | None
    """Slope of the least-squares line of a response's sum of d over its length, nats a token; None
    if all lengths are equal.
    """


def measure_mismatch(
    learner: torch.Tensor,
    sampler: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor | None = None,
    ended: torch.Tensor | None = None,
) -> Mismatch:
    """Return the statistics of log π_learner - log π_sampler over the response tokens.

    Args:
        learner: log-probs by the learner, fp32 [B, T-1].
        sampler: log-probs by the sampler, fp32 [B, T-1].
        response_mask: bool [B, T-1] with at least one True.
        advantages: fp32 [B, T-1].
        ended: bool [B], the sequences whose last token is the end token.
    """
    difference = (learner - sampler)[response_mask].double()
    distance = difference.abs()
    ratio_error = difference.expm1()
    log_w = sequence_log_ratio(learner, sampler, response_mask)
    position = response_mask.cumsum(-1)
    lengths = position[:, -1]
    sums = ((learner - sampler) * response_mask).sum(-1)
    end_tokens = None
    if ended is not None:
        is_last = position == lengths[:, None]
        end_tokens = (ended[:, None] & is_last)[response_mask]
    return Mismatch(
        mean_abs=float(distance.mean()),
        max_abs=float(distance.max()),
        equal=float((difference == 0).double().mean()),
        k3=float((ratio_error - difference).mean()),
        mean_log_w=float(log_w.mean()),
        mean_abs_log_w=float(log_w.abs().mean()),
        log_w_low=float(log_w.min()),
        log_w_high=float(log_w.max()),
        mean=float(difference.mean()),
        std=float(difference.std(unbiased=False)),
        off_10=float((ratio_error.abs() > 0.1).double().mean()),
        off_50=float((ratio_error.abs() > 0.5).double().mean()),
        advantage_correlation=(
            None if advantages is None else _correlation(advantages[response_mask], difference)
        ),
        rare_mean_abs=_mean(distance[sampler[response_mask] < math.log(RARE)]),
        end_mean_abs=None if end_tokens is None else _mean(distance[end_tokens]),
        position_slope=_slope(position[response_mask], distance),
        length_slope=_slope(lengths, sums),
    )


def _mean(values: torch.Tensor) -> float | None:
    """Return the mean; None if there are no values."""
    return float(values.mean()) if len(values) else None


def _slope(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Return the slope of the least-squares line of y [n] over x [n]; None if x does not vary."""
    x = x.double() - x.double().mean()
    y = y.double()
    square = float(x @ x)
    return float(x @ y) / square if square else None


def _correlation(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Return Pearson's correlation of x [n] with y [n]; None if either does not vary."""
    if x.min() == x.max() or y.min() == y.max():
        return None
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])
