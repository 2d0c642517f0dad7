"""The product of an unaligned learner: its master cast to the compute dtype, nothing quantized.

Axes: N tokens, O output rows, I input columns.
"""

import torch
from torch import nn


class PlainMatmul:
    """y = x · Wᵀ + b. weight: the master in the compute dtype [O, I]."""

    name = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        return nn.functional.linear(x, self.weight, self._bias)
