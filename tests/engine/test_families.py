"""Model families without code of their own: log-probs against the sampler, gradients against
transformers.
"""

import pytest
import torch

from benchmarks.families import measure
from tests.support.cases import cases
from tests.support.kernels import TRUNCATES


@pytest.mark.slow
# and what is odd about each
@pytest.mark.parametrize("family", cases(__file__, "families"))
def test_a_family_agrees_to_the_last_bit_and_learns(family: str):
    """Check log-probs and gradients in w8a8, whose activations amplify any other rounding.

    Every token that is sampled after a publish has the learner's log-prob, computed by the engine's
    layers and by layers of the learner's own. Every master has a gradient. All gradients together
    are near those of transformers in float32 on the values of the codes. Both together show that
    the model is transformers': values are vLLM's, and the reference is not. Blind spot: sizes;
    `python -m benchmarks.families` has more of them. With AMX two families round by the batch
    (docs/lab/mismatch-measured.md).
    """
    row = measure(family, "w8a8", "bfloat16", samples=2, tokens=24)
    rounds = family in ("granite-moe-shared", "stablelm") and torch.cpu._is_amx_tile_supported()
    assert min(row["equal"], row["equal_own"]) >= (0.95 if rounds else 1.0)
    assert not row["unreached"]
    floor, reference = (0.96, 0.27) if TRUNCATES else (0.97, 0.25)
    assert row["cosine"] > floor
    assert row["reference"] < reference
