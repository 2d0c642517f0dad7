"""`python -m benchmarks precision`, kept short: its arithmetic and what it must show at a small learning rate."""

import json

import pytest

from benchmarks.precision import PrecisionOptions, as_data, measure, table

MASTERS = (("float32", "nearest"), ("bfloat16", "nearest"), ("bfloat16", "stochastic"))


@pytest.mark.slow
def test_each_precision_keeps_what_it_should():
    """Contract, at 1e-6: the reference drifts from itself by nothing and loses next to nothing. Nearest bfloat16 loses
    nearly all, and its drift is the whole movement. Of stochastic rounding nearly every update leaves the master alone
    and yet all of the movement arrives, on average."""
    options = PrecisionOptions(steps=2, kernel="reference")
    exact, nearest, stochastic = rows = measure(options, MASTERS)
    assert (exact.arrived, exact.drift_mean, exact.drift_max) == (1.0, 0.0, 0.0) and exact.lost_updates < 0.02
    assert nearest.lost_updates > 0.95 and nearest.arrived < 0.05 and 0.9 < nearest.drift_mean < 1.1
    assert stochastic.lost_updates > 0.9 and 0.8 < stochastic.arrived < 1.2 and stochastic.drift_mean > 1
    assert exact.flipped_codes and nearest.flipped_codes is not None and nearest.flipped_codes < exact.flipped_codes
    assert len(json.loads(json.dumps(as_data(rows)))) == 3 == len(table(rows, options).texts()) - 1
