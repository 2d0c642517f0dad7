"""Means over seeds with bootstrap intervals, and paired differences. Everything is a function of its arguments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
COVERAGE = 0.95


@dataclass(frozen=True)
class Estimate:
    """mean over `count` seeds; low, high: ends of its percentile bootstrap interval, NaN for fewer than two seeds. Over
    a handful of seeds such an interval is narrow: read it with the single values beside it."""

    mean: float
    low: float
    high: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values, one a seed. Raises `ValueError` where there are none."""
    if not values:
        raise ValueError("an estimate of no values")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    drawn = np.random.default_rng(0).choice(np.asarray(values, dtype=np.float64), (RESAMPLES, len(values)))
    outside = 50 * (1 - COVERAGE)
    low, high = np.percentile(drawn.mean(axis=1), [outside, 100 - outside])
    return Estimate(mean, float(low), float(high), len(values))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """Of value minus reference by seed, over the seeds both have; None where they share none."""
    shared = sorted(values.keys() & reference.keys())
    return estimate([values[seed] - reference[seed] for seed in shared]) if shared else None


def gap_closed(
    values: Mapping[int, float], plain: Mapping[int, float], unquantized: Mapping[int, float]
) -> float | None:
    """Share of the gap from plain to unquantized that is closed: of the means over the seeds all three have. None where
    they share none, or the plain one does not trail."""
    shared = sorted(values.keys() & plain.keys() & unquantized.keys())
    if not shared:
        return None
    own, low, high = (float(np.mean([of[seed] for seed in shared])) for of in (values, plain, unquantized))
    return (own - low) / (high - low) if high > low else None


def band(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, lowest and highest of several curves, step by step, as far as all go."""
    rows = np.asarray([curve[: min(map(len, curves))] for curve in curves], dtype=np.float64)
    return rows.mean(0).tolist(), rows.min(0).tolist(), rows.max(0).tolist()


def smoothed(curve: Sequence[float], window: int) -> list[float]:
    """Running means over those of the last `window` values (fewer at the start) that are no NaN; NaN without any."""
    parts = ([v for v in curve[max(0, i + 1 - window) : i + 1] if not math.isnan(v)] for i in range(len(curve)))
    return [float(np.mean(part)) if part else math.nan for part in parts]
