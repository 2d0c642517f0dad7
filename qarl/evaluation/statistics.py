"""Means of independent values with their intervals: bootstrap, and Jeffreys' for shares that it
says nothing of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
COVERAGE = 0.95
_DRAWN_AT_ONCE = 2**22
"""Values of resamples held at a time, 32 MiB."""


@dataclass(frozen=True)
class Estimate:
    """mean over `count` values; low, high: ends of its 95 % interval, NaN for fewer than two
    values. Over a handful, such as seeds, such an interval is narrow: read it with the single
    values beside it.
    """

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float], shares: bool = False) -> Estimate:
    """Of independent values, one a seed or a question; see `estimate_of_means`."""
    return estimate_of_means([values], shares)


def estimate_of_means(groups: Sequence[Sequence[float]], shares: bool = False) -> Estimate:
    """Of the plain mean of the groups' means, whatever their sizes; values are drawn again within
    each group.

    shares: values are of [0, 1], such as a question's right answers. Groups of nothing but 0 or but
    1, of which a bootstrap draws one value alone, have the share's posterior under Jeffreys' prior
    then. Raises `ValueError` where there are none.
    """
    if not groups or not all(len(values) for values in groups):
        raise ValueError("an estimate of no values")
    mean = float(np.mean([np.mean(values) for values in groups]))
    count = sum(map(len, groups))
    if count == len(groups):
        return Estimate(mean, math.nan, math.nan, count)
    parts = [
        _resampled(v, s) if not shares or min(v) < max(v) else _posterior(v, s)
        for s, v in enumerate(groups)
    ]
    drawn = np.mean(parts, axis=0)
    outside = 50 * (1 - COVERAGE)
    low, high = np.percentile(drawn, [outside, 100 - outside])
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)), count)


def _posterior(values: Sequence[float], seed: int) -> np.ndarray:
    """Draws of a share that was the same in all values, fp64: Beta(k + 1/2, n - k + 1/2)."""
    right = sum(values)
    return np.random.default_rng(seed).beta(right + 0.5, len(values) - right + 0.5, RESAMPLES)


def _resampled(values: Sequence[float], seed: int) -> np.ndarray:
    """Means of `RESAMPLES` draws with replacement, fp64."""
    rng, source = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    at_once = max(1, _DRAWN_AT_ONCE // len(source))
    parts = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    return np.concatenate([rng.choice(source, (rows, len(source))).mean(axis=1) for rows in parts])
