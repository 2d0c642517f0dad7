"""Fake-quant arithmetic: dequantize weight and activation, multiply in the compute dtype."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation


@dataclass(frozen=True)
class DequantizedMatmul:
    """y = dequant(x) · dequant(W)ᵀ + b, all in the compute dtype. weight: compute dtype [O, I]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    source: LowBitWeight
    name: str = "dequantized"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        if self.source.scheme.activations is not None:
            x = quantize_activation(x, self.source.scheme).dequantized(x.dtype)
        return F.linear(x, self.weight, self.bias)


class ReferenceFactory:
    """Makes dequantized products in one compute dtype; runs for every scheme, everywhere."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def __call__(self, layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> DequantizedMatmul:
        """See `KernelFactory`."""
        return DequantizedMatmul(weight.dequantized(self._dtype), bias, weight)
