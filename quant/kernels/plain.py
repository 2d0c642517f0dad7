"""Products in the compute dtype: of masters cast to it (the unaligned learner), or of dequantized codes (fake quant).

Axes: N tokens, O output rows, I input columns.
"""

from dataclasses import dataclass

import torch
from torch import nn

from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.schemes import Scheme


@dataclass(frozen=True)
class PlainMatmul:
    """y = x · Wᵀ + b. weight: compute dtype [O, I]. rounds: the scheme whose activation codes x is rounded to first;
    None: nothing is quantized."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    rounds: Scheme | None = None
    name: str = "plain"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        if self.rounds is not None and self.rounds.activations is not None:
            x = quantize_activation(x, self.rounds).dequantized(x.dtype)
        return nn.functional.linear(x, self.weight, self.bias)


def dequantized_matmul(weight: LowBitWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> PlainMatmul:
    """dequant(x) · dequant(W)ᵀ + b, all in `dtype`; runs for every scheme, everywhere."""
    return PlainMatmul(weight.dequantized(dtype), bias, weight.scheme, "dequantized")
