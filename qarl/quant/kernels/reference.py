"""Kernels that multiply in the compute dtype.

The weight is a master cast to that dtype (the unaligned learner) or dequantized codes (fake quant).

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.kernels.experts_loop import ExpertsLoop
from qarl.quant.kernels.gates import gate_of
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.schemes import Scheme


@dataclass(frozen=True)
class PlainMatmul:
    """Kernel of the dense product y = x · Wᵀ + b."""

    weight: torch.Tensor
    """W, compute dtype [O, I]."""
    bias: torch.Tensor | None
    """b, compute dtype [O]."""
    rounds: Scheme | None = None
    """Scheme to whose activation codes x is rounded first; None to leave x as it is."""
    name = "plain"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x, compute dtype [N, I]; returns compute dtype [N, O]."""
        if self.rounds is not None and self.rounds.activations is not None:
            x = quantize_activation(x, self.rounds).dequantized(x.dtype)
        y = nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return y.to(x.dtype)


@dataclass(frozen=True)
class SideBySide:
    """Kernel of several layers with the same input, which multiplies them one at a time.

    Each layer's outputs have the bits that they have on their own.
    """

    parts: Sequence[LowBitMatmul]
    """Kernel of each layer."""
    name: str = "dequantized"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x, compute dtype [N, I]; returns all outputs side by side, [N, ΣO]."""
        outputs = [part(x) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@dataclass(frozen=True)
class ReferenceFactory:
    """Factory of kernels that dequantize, then multiply, in `dtype`.

    It supports every scheme on every device.
    """

    dtype: torch.dtype
    """Compute dtype."""

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> SideBySide:
        """Return a layer's kernel; see `KernelFactory.linear`."""
        dtype = self.dtype if like is None else like.params_dtype
        parts = [
            PlainMatmul(weight.dequantized(dtype), bias, weight.scheme)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return SideBySide(parts)

    def experts(
        self,
        layer: str,
        shape: ExpertsShape,
        weights: LowBitExperts,
        biases: Sequence[torch.Tensor] = (),
    ) -> ExpertsLoop:
        """Return a layer's experts; see `KernelFactory.experts`."""

        def expert_kernel(weight: LowBitWeight, bias: torch.Tensor | None) -> SideBySide:
            return self.linear(layer, [weight], [bias])

        first, second = biases or ([None] * shape.experts,) * 2
        pairs = [
            (
                expert_kernel(expert.gate_up, first[number]),
                expert_kernel(expert.down, second[number]),
            )
            for number, expert in enumerate(weights.experts)
        ]
        return ExpertsLoop(pairs, gate_of(shape.activation, shape.layout.gated))
