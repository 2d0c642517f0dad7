"""Means of independent values with their intervals: by bootstrap, and Jeffreys' for fractions that
are all 0 or all 1, about which a bootstrap says nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
"""Number of bootstrap resamples."""
COVERAGE = 0.95
"""Coverage of the intervals."""
_DRAWN_AT_ONCE = 2**22
"""Upper bound on the resampled values in memory at a time, 32 MiB."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval.

    The interval of a handful of values, such as seeds, is too narrow: read it with the single
    values beside it.
    """

    mean: float
    low: float
    """Lower end of the interval, NaN for fewer than two values."""
    high: float
    """Upper end of the interval, NaN for fewer than two values."""
    count: int
    """Number of values."""


def estimate(values: Sequence[float], shares: bool = False) -> Estimate:
    """Estimate the mean of independent values, one a seed or question; see `estimate_of_means`."""
    return estimate_of_means([values], shares)


def estimate_of_means(groups: Sequence[Sequence[float]], shares: bool = False) -> Estimate:
    """Estimate the unweighted mean of the groups' means, by resampling within each group.

    shares: values are fractions in [0, 1], such as those of right answers to a question. A group of
    only 0 or only 1, of which a bootstrap can draw one value only, then has the fraction's
    posterior under Jeffreys' prior. Raises `ValueError` if a group is empty or there is none.
    """
    if not groups or not all(len(values) for values in groups):
        raise ValueError("an estimate of no values")
    mean = float(np.mean([np.mean(values) for values in groups]))
    count = sum(map(len, groups))
    if count == len(groups):
        return Estimate(mean, math.nan, math.nan, count)
    parts = []
    for seed, values in enumerate(groups):
        constant = shares and not min(values) < max(values)
        parts.append(_posterior(values, seed) if constant else _resampled(values, seed))
    drawn = np.mean(parts, axis=0)
    outside = 50 * (1 - COVERAGE)
    low, high = np.percentile(drawn, [outside, 100 - outside])
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)), count)


def _posterior(values: Sequence[float], seed: int) -> np.ndarray:
    """Draw a fraction that was the same in all values, fp64: Beta(k + 1/2, n - k + 1/2)."""
    right = sum(values)
    return np.random.default_rng(seed).beta(right + 0.5, len(values) - right + 0.5, RESAMPLES)


def _resampled(values: Sequence[float], seed: int) -> np.ndarray:
    """Return the means of `RESAMPLES` resamples, drawn with replacement, fp64."""
    rng = np.random.default_rng(seed)
    source = np.asarray(values, dtype=np.float64)
    chunk = max(1, _DRAWN_AT_ONCE // len(source))
    rows_of_chunks = [min(chunk, RESAMPLES - done) for done in range(0, RESAMPLES, chunk)]
    samples = (rng.choice(source, (rows, len(source))) for rows in rows_of_chunks)
    means = [sample.mean(axis=1) for sample in samples]
    return np.concatenate(means)
