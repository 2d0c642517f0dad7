"""The backward of routed experts as grouped products, for tensor cores.

All experts are computed at once, and the host never waits for the device. The computation is that
of `quant.layers.experts` except for its precision: operands and results of products are bfloat16,
sums fp32. A matrix's gradient is therefore rounded once for each `GROUPED_TOKENS` tokens, before it
is accumulated in fp32.

Axes: N tokens, K experts a token, M = N·K rows sorted by expert, E experts, H hidden columns, I
expert columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from qarl.quant.limits import GROUPED_TOKENS

_ALIGNED = 8
"""Number of bf16 elements in 16 bytes, at whose multiples rows of a grouped product's operands
begin.
"""


@dataclass(frozen=True)
class MatrixGradient:
    """Gradient of all experts' matrices [E, O, I], as its two factors.

    The gradient of an expert's matrix is outputᵀ · input over the expert's rows.
    """

    output: torch.Tensor
    """Gradient of the product's output, bf16 [M, O]."""
    input: torch.Tensor
    """The product's input as multiplied, bf16 [M, I]."""
    ends: torch.Tensor
    """End of each expert's rows, int32 [E]."""

    def dense(self) -> torch.Tensor:
        """Multiply the factors: return the gradient of the matrices, bf16 [E, O, I]."""
        return _outer(self.output, self.input, self.ends)

    def factors(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of low-rank factors a [E, R, I] and b [E, O, R] of the matrices.

        They are bf16, of the factors' shapes (`quant.layers.lora`).
        """
        a = a.to(self.input.dtype)
        b = b.to(self.output.dtype)
        down = grouped_mm(self.input, a.transpose(1, 2), offs=self.ends)
        up = grouped_mm(self.output, b, offs=self.ends)
        da = _outer(up, self.input, self.ends)
        db = _outer(self.output, down, self.ends)
        return da, db


@dataclass(frozen=True)
class TokenGradients:
    """Gradients for a block of N tokens."""

    x: torch.Tensor
    """Gradient of the input, fp32 [N, H]."""
    weights: torch.Tensor
    """Gradient of the routing weights, fp32 [N, K]."""
    matrices: tuple[MatrixGradient, MatrixGradient]
    """Gradients of gate and up as one matrix, and of down."""


grouped_mm = nn.functional.grouped_mm


def aligned(*sizes: int) -> bool:
    """Return whether grouped products support matrices of these rows and columns."""
    return all(size % _ALIGNED == 0 for size in sizes)


def token_gradients(
    x: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    dy: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    gated: Callable[[torch.Tensor], torch.Tensor],
    multiplied: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[TokenGradients]:
    """Yield the gradients for the experts' output gradient, `GROUPED_TOKENS` tokens at a time.

    Args:
        x: input as multiplied, bf16 [N, H].
        weights: routing weights, fp32 [N, K].
        index: expert numbers, integer [N, K].
        dy: gradient of the output, bf16 [N, H].
        matrices: gate and up, bf16 [E, 2I, H]; down, bf16 [E, H, I].
        gated: maps the first product to the second's input before rounding, fp32 [M, 2I] → [M, I].
        multiplied: maps the second product's input to its values as multiplied, bf16 [M, I] → the
            same.
    """
    gate_up, down = matrices
    numbers = torch.arange(len(down), device=index.device)
    parts = zip(
        x.split(GROUPED_TOKENS),
        weights.split(GROUPED_TOKENS),
        index.split(GROUPED_TOKENS),
        dy.split(GROUPED_TOKENS),
        strict=True,
    )
    for x_part, weights_part, index_part, dy_part in parts:
        sorted_index, order = index_part.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_index, numbers, right=True, out_int32=True)
        tokens = order // index.shape[1]
        scale = weights_part.flatten()[order, None]
        rows = x_part[tokens]
        drows = dy_part[tokens]
        with torch.enable_grad():
            merged = (
                grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
                .to(torch.float32)
                .requires_grad_()
            )
            activated = gated(merged)
        used = multiplied(activated.detach().to(x.dtype))
        # gradient before it is multiplied by the token's weight
        dactivated = grouped_mm(drows, down, offs=ends).to(torch.float32)
        dweights = (dactivated * used.to(torch.float32)).sum(-1)
        (dmerged,) = torch.autograd.grad(activated, merged, dactivated * scale)
        # Frees 20 · I bytes a row before the widest of the remaining tensors is allocated.
        del merged, activated, dactivated
        dmerged = dmerged.to(x.dtype)
        drow = _unsorted(grouped_mm(dmerged, gate_up, offs=ends), order)
        dx = drow.view(*index_part.shape, -1).sum(1, dtype=torch.float32)
        del drow
        dout = (drows * scale).to(x.dtype)
        del drows
        yield TokenGradients(
            x=dx,
            weights=_unsorted(dweights, order).view(weights_part.shape),
            matrices=(
                MatrixGradient(dmerged, rows, ends),
                MatrixGradient(dout, used, ends),
            ),
        )
        del rows, used, dmerged, dx, dout


def _unsorted(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the rows in the order they had before sorting; `order` sorted them."""
    unsorted = torch.empty_like(rows)
    unsorted[order] = rows
    return unsorted


def _outer(
    left: torch.Tensor,
    right: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Return leftᵀ · right over each expert's rows.

    An expert without rows gets zeros, which torch's documentation does not promise.
    """
    outer = grouped_mm(left.t(), right, offs=ends)
    empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
    return outer.masked_fill_(empty[:, None, None], 0.0)
