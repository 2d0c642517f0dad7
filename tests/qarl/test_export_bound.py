"""How near an export's log-probs have to be, on CPUs and on CUDA."""

import math

from qarl.run.verify_export import difference_beyond


def test_an_export_is_held_to_bits_on_cpus_and_to_a_bound_on_cuda():
    expected = [[-1.0, -2.0], [-0.5]]
    near = [[-1.0, -2.0], [-0.5 - 3e-3]]
    assert difference_beyond(None, expected, expected) is None
    assert difference_beyond(None, near, expected) == ""
    assert difference_beyond(0.01, near, expected) is None
    assert difference_beyond(1e-4, near, expected) == (
        ", by 0.001 nats a token in the mean, above the bound 0.0001 (sync.canary_bound)"
    )
    assert difference_beyond(0.01, [[math.nan, -2.0], [-0.5]], expected) is not None
