"""Products in the compute dtype: of masters cast to it (the unaligned learner), or of dequantized codes (fake quant).

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.experts_loop import ExpertsLoop
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.materialize.experts import LowBitExperts
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


@dataclass(frozen=True)
class _Stacked:
    """Products of one input, their outputs one after the other: each with the bits it has alone."""

    parts: Sequence[PlainMatmul]
    name: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O of all]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True)
class ReferenceFactory:
    """dequant(x) · dequant(W)ᵀ + b, all in `dtype`; runs for every scheme, everywhere."""

    dtype: torch.dtype

    def __call__(self, layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> PlainMatmul:
        """See `KernelFactory`."""
        return PlainMatmul(weight.dequantized(self.dtype), bias, weight.scheme, "dequantized")

    def stacked(self, name: str, weights: Sequence[LowBitWeight], biases: Sequence[torch.Tensor | None]) -> _Stacked:
        """See `KernelFactory.stacked`."""
        parts = [self(name, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return _Stacked(parts, parts[0].name)

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> ExpertsLoop:
        """See `KernelFactory.experts`."""
        pairs = [(self(layer, expert.gate_up, None), self(layer, expert.down, None)) for expert in weights.experts]
        return ExpertsLoop(pairs, shape.activation)
