"""Routed experts as dense products, one expert after another, if there is no grouped kernel.

Axes: N tokens, K experts a token, H hidden columns, I expert columns.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qarl.quant.kernels.base import LowBitMatmul


def sum_over_experts(
    x: Tensor, weights: Tensor, index: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return Σ_k w_k · expert_k(x) over each token's K experts, compute dtype [N, H].

    The sum is taken in fp32, in the order of the experts' numbers, and rounded once. Learner and
    engine both call this function, so their sums have the same bits.

    Args:
        x: inputs, compute dtype [N, H].
        weights: weight of each expert, floating [N, K].
        index: numbers of each token's experts, integer [N, K].
        expert: function of an expert's number and its tokens [n, H] → compute dtype [n, H].
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number in index.unique().tolist():
        rows, slots = (index == number).nonzero(as_tuple=True)
        output = expert(number, x[rows]).to(torch.float32)
        total.index_add_(0, rows, output * weights[rows, slots, None].to(torch.float32))
    return total.to(x.dtype)


class ExpertsLoop:
    """Experts y = Σ_k w_k · down(gated(gate_up(x))), summed by `sum_over_experts`."""

    def __init__(
        self,
        pairs: Sequence[tuple[LowBitMatmul, LowBitMatmul]],
        gated: Callable[[Tensor], Tensor],
    ):
        """Take every expert's pair of kernels.

        Args:
            pairs: kernels of gate and up, [2I, H], and of down, [H, I].
            gated: function between the two products, see `gate_of`.
        """
        self._pairs = pairs
        self._gated = gated
        self.name = f"{pairs[0][0].name}, per expert"

    def __call__(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see `ExpertsMatmul`."""
        return sum_over_experts(x, weights, index, self._expert)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """Return one expert's output for its tokens [n, H]."""
        gate_up, down = self._pairs[expert]
        return down(self._gated(gate_up(x)))
