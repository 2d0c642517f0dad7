"""Routed experts as dense products, one expert after another: where there is no grouped kernel.

Axes: N tokens, K experts a token, H hidden columns, I expert columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from qarl.quant.kernels.base import LowBitMatmul


def sum_over_experts(
    x: Tensor, weights: Tensor, index: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Σ_k w_k · expert_k(x) over each token's K experts, summed in fp32 in the order of the
    experts' numbers and rounded once: in learner and engine, so that both add up to the same bits.

    x: compute dtype [N, H]; weights: floating [N, K]; index: integer [N, K]; expert: number and its
    tokens [n, H] → compute dtype [n, H]. Returns compute dtype [N, H].
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in index.unique().tolist():
        rows, slots = (index == number).nonzero(as_tuple=True)
        output = expert(number, x[rows]).to(torch.float32)
        total.index_add_(0, rows, output * weights[rows, slots, None].to(torch.float32))
    return total.to(x.dtype)


class ExpertsLoop:
    """y = Σ_k w_k · down(act(gate(x)) · up(x)), as `sum_over_experts` adds it up."""

    def __init__(self, pairs: Sequence[tuple[LowBitMatmul, LowBitMatmul]], activation: str):
        """pairs: each expert's product with [2I, H] (gate rows first) and with [H, I]."""
        self._pairs = pairs
        self._activation: nn.Module = ACT2FN[activation]
        self.name = f"{pairs[0][0].name}, per expert"

    def __call__(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """See `ExpertsMatmul`."""
        return sum_over_experts(x, weights, index, self._one)

    def _one(self, expert: int, x: Tensor) -> Tensor:
        gate_up, down = self._pairs[expert]
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(self._activation(gate) * up)
