"""The light table of what schemes store, held to the schemes themselves."""

import pytest
import torch

from qarl.quant.checkpoint.stored import STORED
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.materialize.size import stored_bytes
from qarl.quant.schemes import SCHEMES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 256), (384, 128)])
def test_the_table_counts_what_schemes_store(shape: tuple[int, int], dtype: torch.dtype):
    assert list(STORED) == list(SCHEMES)
    for name, scheme in SCHEMES.items():
        assert STORED[name].weight(shape, dtype.itemsize) == stored_bytes(scheme, shape, dtype), name


def test_inputs_are_kept_in_the_bits_of_the_table():
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    for name, scheme in SCHEMES.items():
        kept = x if scheme.activations is None else quantize_activation(x, scheme).codes
        assert STORED[name].input(x.element_size()) * x.numel() == kept.numel() * kept.element_size(), name
