"""The benchmarks of deltas: what they add up and refuse; figures they cannot test."""

import pytest

from configs.errors import ConfigError
from qarl.bench import delivery, delta
from quant.checkpoint.load import empty_model


@pytest.mark.parametrize("shape", delta.SHAPES)
def test_kinds_of_matrices_add_up_to_the_model(shape: str):
    config = delta.SHAPES[shape]()
    counted = sum(kind.count * kind.rows * kind.columns for kind in delta.kinds(config))
    assert counted == pytest.approx(sum(p.numel() for p in empty_model(config).parameters()), rel=2e-3)


def test_ratios_are_of_what_they_say():
    bf16 = {"full_bytes": 100, "seconds": {"write": 2.0, "load, paused": 8.0}}
    seconds = {"write": 1.0, "read and hash": 1.0, "load, paused": 2.0, "copy once": 0.5}
    deltas = {"delta: encode": 0.4, "delta: swap, paused": 0.1}
    row = {"full_bytes": 25, "delta_bytes": 1, "seconds": seconds | deltas}
    assert delivery.ratios(row, bf16) == delivery.Ratios(
        full_bytes=0.25, full_seconds=0.4, delta_bytes=0.04, delta_seconds=0.05, pause=0.05, copies=8.0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"shape": "7b"}, "'7b'.*0.6b"), ({"rounds": 0}, "--rounds 0"), ({"folder": "no/such"}, "'no/such' is no folder")],
)
def test_unusable_values_are_refused_before_anything_is_built(changes: dict, message: str):
    options = {"shape": "tiny", "schemes": ["w4a16"], "lr": 1e-6, "rounds": 1, "folder": None, "say": print}
    with pytest.raises(ConfigError, match=message):
        delivery.measure(**{**options, **changes})
