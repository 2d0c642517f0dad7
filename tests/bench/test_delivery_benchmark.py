"""The benchmarks of deltas: what they add up and refuse; figures they cannot test."""

import pytest

from benchmarks import delivery, delta, soak
from qarl.quant.checkpoint.load import empty_model


@pytest.mark.parametrize("shape", delta.SHAPES)
def test_kinds_of_matrices_add_up_to_the_model(shape: str):
    config = delta.SHAPES[shape]()
    counted = sum(kind.count * kind.rows * kind.columns for kind in delta.kinds(config))
    assert counted == pytest.approx(sum(p.numel() for p in empty_model(config).parameters()), rel=2e-3)


def test_ratios_are_of_what_they_say():
    bf16 = {"bf16: write": 2.0, "bf16: load, paused": 8.0}
    whole = {"whole: write": 1.0, "whole: stage": 2.0, "whole: pause": 1.0, "copy once": 0.5}
    delta = {"delta: write": 0.25, "delta: stage": 0.25, "delta: pause": 0.5}
    sizes = {"full_bytes": 40, "unquantized_bytes": 20, "delta_bytes": 1, "bf16_bytes": 100}
    assert delivery.ratios({**sizes, "seconds": bf16 | whole | delta}) == delivery.Ratios(
        full_bytes=0.4, quantized_bytes=0.25, full_seconds=0.4, delta_bytes=0.025, delta_seconds=0.1,
        full_pause=0.125, delta_pause=0.0625, copies=8.0,
    )  # fmt: skip


def test_memory_is_fitted_without_its_warm_up():
    """Contract: the slope is per hundred steps, of what follows the first tenth; its error is that of block means."""
    points = [(step, 5000.0 if step <= 20 else 100 + 0.02 * step + (-1) ** step) for step in range(1, 200)]
    fit = soak.fitted(points, 200)
    assert fit["slope"] == pytest.approx(2, abs=0.3)
    assert 0 < fit["error"] < 0.3
    assert fit["last"] - fit["first"] == pytest.approx(1.8 * 0.95 * 2, abs=0.3)
