"""Means of independent values with bootstrap intervals. Everything is a function of its arguments."""

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
    """mean over `count` values; low, high: ends of its percentile bootstrap interval, NaN for fewer than two values.
    Over a handful, such as seeds, such an interval is narrow: read it with the single values beside it."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values, one a seed or a question. Raises `ValueError` where there are none."""
    return estimate_of_means([values])


def estimate_of_means(groups: Sequence[Sequence[float]]) -> Estimate:
    """Of the plain mean of the groups' means, whatever their sizes; values are drawn again within each group. Raises
    `ValueError` where there are none."""
    if not groups or not all(len(values) for values in groups):
        raise ValueError("an estimate of no values")
    mean = float(np.mean([np.mean(values) for values in groups]))
    count = sum(map(len, groups))
    if count == len(groups):
        return Estimate(mean, math.nan, math.nan, count)
    drawn = np.mean([_resampled(values, seed) for seed, values in enumerate(groups)], axis=0)
    outside = 50 * (1 - COVERAGE)
    low, high = np.percentile(drawn, [outside, 100 - outside])
    return Estimate(mean, float(low), float(high), count)


def _resampled(values: Sequence[float], seed: int) -> np.ndarray:
    """Means of `RESAMPLES` draws with replacement, fp64."""
    rng, source = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    at_once = max(1, _DRAWN_AT_ONCE // len(source))
    parts = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    return np.concatenate([rng.choice(source, (rows, len(source))).mean(axis=1) for rows in parts])
