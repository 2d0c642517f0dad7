"""The light table of what schemes store: `test_materialize` holds its weights to tensors, this its inputs."""

import torch

from qarl.quant.checkpoint.stored import STORED
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.schemes import SCHEMES


def test_inputs_are_kept_in_the_bits_of_the_table():
    assert list(STORED) == list(SCHEMES)
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    for name, scheme in SCHEMES.items():
        kept = x if scheme.activations is None else quantize_activation(x, scheme).codes
        assert STORED[name].input(x.element_size()) * x.numel() == kept.numel() * kept.element_size(), name
