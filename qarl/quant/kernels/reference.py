"""Products in the compute dtype: of masters cast to it (the unaligned learner), or of dequantized
codes (fake quant).

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
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.schemes import Scheme


@dataclass(frozen=True)
class PlainMatmul:
    """y = x · Wᵀ + b. weight: compute dtype [O, I]. rounds: the scheme whose activation codes x is
    rounded to first; None: nothing is quantized.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rounds: Scheme | None = None
    name = "plain"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        if self.rounds is not None and self.rounds.activations is not None:
            x = quantize_activation(x, self.rounds).dequantized(x.dtype)
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


@dataclass(frozen=True)
class SideBySide:
    """Layers of one input, their rows one after the other, each with the bits it has alone."""

    parts: Sequence[LowBitMatmul]
    name: str = "dequantized"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O of all]."""
        outputs = [part(x) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


@dataclass(frozen=True)
class ReferenceFactory:
    """Dequantizes, then multiplies, all in `dtype`; runs for every scheme, everywhere."""

    dtype: torch.dtype

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> SideBySide:
        """See `KernelFactory.linear`."""
        dtype = self.dtype if like is None else like.params_dtype
        parts = zip(weights, biases, strict=True)
        return SideBySide([PlainMatmul(w.dequantized(dtype), b, w.scheme) for w, b in parts])

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> ExpertsLoop:
        """See `KernelFactory.experts`."""

        def product(weight: LowBitWeight) -> SideBySide:
            return self.linear(layer, [weight], [None])

        return ExpertsLoop(
            [(product(e.gate_up), product(e.down)) for e in weights.experts],
            shape.activation,
        )
