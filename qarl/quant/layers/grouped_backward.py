"""The backward of routed experts as grouped products, for tensor cores: all experts at once, and
the host waits for nothing. As `quant.layers.experts` has it expert after expert, but for its
precision: operands and results of products are bfloat16, sums fp32. So a matrix's gradient is
rounded once for each `TOKENS` tokens, before it is added up in fp32.

Axes: N tokens, K experts a token, M = N·K rows sorted by expert, E experts, H hidden columns, I
expert columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

TOKENS = 8192
"""That are done at once: K rows of several widths are kept for each."""

_ALIGNED = 8
"""Rows of a grouped product's operands begin at multiples of 16 bytes."""


@dataclass(frozen=True)
class MatrixGradient:
    """Of all experts' matrices [E, O, I]: outputᵀ · input over each expert's rows. output: the
    gradient of the product's output, bf16 [M, O]; input: as multiplied, bf16 [M, I]; ends: of the
    experts' rows, int32 [E].
    """

    output: torch.Tensor
    input: torch.Tensor
    ends: torch.Tensor

    def product(self) -> torch.Tensor:
        """bf16 [E, O, I]."""
        return _outer(self.output, self.input, self.ends)

    def factors(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of low-rank factors a [E, R, I], b [E, O, R] of the matrices (`quant.layers.lora`): bf16,
        of their shapes.
        """
        down = grouped_mm(self.input, a.to(self.input.dtype).transpose(1, 2), offs=self.ends)
        up = grouped_mm(self.output, b.to(self.output.dtype), offs=self.ends)
        return _outer(up, self.input, self.ends), _outer(self.output, down, self.ends)


@dataclass(frozen=True)
class TokenGradients:
    """x: fp32 [N, H]. weights: fp32 [N, K]. matrices: of gate and up, and of down."""

    x: torch.Tensor
    weights: torch.Tensor
    matrices: tuple[MatrixGradient, MatrixGradient]


grouped_mm = nn.functional.grouped_mm


def aligned(*sizes: int) -> bool:
    """Whether grouped products take matrices of such rows and columns."""
    return all(size % _ALIGNED == 0 for size in sizes)


def token_gradients(
    x: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    dy: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    activation: Callable[[torch.Tensor], torch.Tensor],
    multiplied: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[TokenGradients]:
    """Gradients of the experts' output, some tokens at a time.

    x, as multiplied, and dy: bf16 [N, H]; weights: fp32 [N, K]; index: integer [N, K]; matrices:
    gate and up [E, 2I, H], and down [E, H, I], bf16; activation: of the gate, in fp32; multiplied:
    what the second product takes for its input, bf16 [M, I] → the same.
    """
    gate_up, down = matrices
    numbers = torch.arange(len(down), device=index.device)
    parts = zip(
        x.split(TOKENS),
        weights.split(TOKENS),
        index.split(TOKENS),
        dy.split(TOKENS),
        strict=True,
    )
    for x_part, weights_part, index_part, dy_part in parts:
        sorted_index, order = index_part.flatten().sort(stable=True)
        ends = torch.searchsorted(sorted_index, numbers, right=True, out_int32=True)
        tokens, scale = order // index.shape[1], weights_part.flatten()[order, None]
        rows, drows = x_part[tokens], dy_part[tokens]
        with torch.enable_grad():
            merged = (
                grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
                .to(torch.float32)
                .requires_grad_()
            )
            gate, up = merged.chunk(2, dim=-1)
            activated = activation(gate) * up
        used = multiplied(activated.detach().to(x.dtype))
        # before the token's weight
        dactivated = grouped_mm(drows, down, offs=ends).to(torch.float32)
        dweights = (dactivated * used.to(torch.float32)).sum(-1)
        (dmerged,) = torch.autograd.grad(activated, merged, dactivated * scale)
        # 20 I bytes a row, while the widest of what is left is made
        del merged, gate, up, activated, dactivated
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
    there = torch.empty_like(rows)
    there[order] = rows
    return there


def _outer(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """leftᵀ · right over each expert's rows. An expert without rows gets zeros, which no page of
    torch's says.
    """
    product = grouped_mm(left.t(), right, offs=ends)
    empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
    return product.masked_fill_(empty[:, None, None], 0.0)
