"""How far two policies' log-probs of the same tokens are apart, and where.

Axes: B sequences, T tokens, of which T-1 are predicted; n response tokens of all sequences.
"""

import math
from dataclasses import dataclass

import torch

from qarl.learner.objectives.ratios import sequence_log_ratio

RARE = 0.01
"""Probability by the sampler below which a token is a rare one."""


@dataclass(frozen=True)
class Mismatch:
    """Over the response tokens of a batch, in nats, of d = log π_learner - log π_sampler. mean_abs,
    max_abs: of d. equal: share of the tokens where d is zero, to the last bit. k3: mean of exp(d) -
    1 - d, an unbiased estimate of KL(sampler ‖ learner). mean_log_w, mean_abs_log_w, log_w_low,
    log_w_high: of the sequences' log mismatch weights (token means).

    mean, std: of d, with its sign. off_10, off_50: shares of the tokens whose ratio exp(d) is off 1
    by more than 10 and 50 %. advantage_correlation: Pearson's, of d with the advantage.
    rare_mean_abs, end_mean_abs: mean |d| of the tokens the sampler gave less than `RARE`, and of
    end tokens. position_slope: of the line through |d| over the position in the response, nats a
    token. length_slope: of that through a response's sum of d over its length, nats a token. The
    last five are None where there is no such token, or nothing varies.
    """

    mean_abs: float
    max_abs: float
    equal: float
    k3: float
    mean_log_w: float
    mean_abs_log_w: float
    log_w_low: float
    log_w_high: float
    mean: float
    std: float
    off_10: float
    off_50: float
    advantage_correlation: float | None
    rare_mean_abs: float | None
    end_mean_abs: float | None
    position_slope: float | None
    length_slope: float | None


def measure_mismatch(
    learner: torch.Tensor,
    sampler: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor | None = None,
    ended: torch.Tensor | None = None,
) -> Mismatch:
    """learner, sampler, advantages: fp32 [B, T-1]; response_mask: bool [B, T-1] with at least one
    True; ended: bool [B], the sequences whose last token is the end token.
    """
    difference = (learner - sampler)[response_mask].double()
    apart, off = difference.abs(), difference.expm1()
    log_w = sequence_log_ratio(learner, sampler, response_mask)
    position = response_mask.cumsum(-1)
    lengths = position[:, -1]
    sums = ((learner - sampler) * response_mask).sum(-1)
    end = (
        None if ended is None else (ended[:, None] & (position == lengths[:, None]))[response_mask]
    )
    return Mismatch(
        mean_abs=float(apart.mean()),
        max_abs=float(apart.max()),
        equal=float((difference == 0).double().mean()),
        k3=float((off - difference).mean()),
        mean_log_w=float(log_w.mean()),
        mean_abs_log_w=float(log_w.abs().mean()),
        log_w_low=float(log_w.min()),
        log_w_high=float(log_w.max()),
        mean=float(difference.mean()),
        std=float(difference.std(unbiased=False)),
        off_10=float((off.abs() > 0.1).double().mean()),
        off_50=float((off.abs() > 0.5).double().mean()),
        advantage_correlation=(
            None if advantages is None else _correlation(advantages[response_mask], difference)
        ),
        rare_mean_abs=_mean(apart[sampler[response_mask] < math.log(RARE)]),
        end_mean_abs=None if end is None else _mean(apart[end]),
        position_slope=_slope(position[response_mask], apart),
        length_slope=_slope(lengths, sums),
    )


def _mean(values: torch.Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _slope(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Of the least-squares line of y [n] over x [n]; None where x does not vary."""
    x, y = x.double() - x.double().mean(), y.double()
    square = float(x @ x)
    return float(x @ y) / square if square else None


def _correlation(x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Pearson's, of [n] with [n]; None where either does not vary."""
    if any(values.min() == values.max() for values in (x, y)):
        return None
    x, y = (values.double() - values.double().mean() for values in (x, y))
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
