"""How much of a gap is closed over seeds, and curves of several seeds as one. Everything is a function of its
arguments."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from qarl.evaluation.statistics import paired


def gap_closed(
    values: Mapping[int, float], plain: Mapping[int, float], unquantized: Mapping[int, float]
) -> float | None:
    """Share of the gap from plain to unquantized that is closed: of the means over the seeds all three have. None where
    they share none, or where there is no gap: plain does not trail, or the interval of its distance has 0 in it."""
    shared = sorted(values.keys() & plain.keys() & unquantized.keys())
    if not shared:
        return None
    own, low, high = (float(np.mean([of[seed] for seed in shared])) for of in (values, plain, unquantized))
    trailing = paired({seed: plain[seed] for seed in shared}, unquantized)
    assert trailing is not None
    return None if low >= high or trailing.high >= 0 else (own - low) / (high - low)  # of one seed `high` is NaN


def band(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, lowest and highest of several curves, step by step, as far as all go."""
    rows = np.asarray([curve[: min(map(len, curves))] for curve in curves], dtype=np.float64)
    return rows.mean(0).tolist(), rows.min(0).tolist(), rows.max(0).tolist()


def smoothed(curve: Sequence[float], window: int) -> list[float]:
    """Running means over those of the last `window` values (fewer at the start) that are no NaN; NaN without any."""
    parts = ([v for v in curve[max(0, i + 1 - window) : i + 1] if not math.isnan(v)] for i in range(len(curve)))
    return [float(np.mean(part)) if part else math.nan for part in parts]
