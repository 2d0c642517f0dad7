"""A Triton product of packed int4 or int8 weights with compute-dtype activations. Import only with CUDA and Triton.

Codes are small integers, exact in every compute dtype; float32 is multiplied as such, not as TF32. So a block of them
is multiplied as it is, with fp32 sums, and the block's scale multiplies that sum in fp32: nothing is rounded before the
output is.
Axes: N tokens, O output rows, I input columns, Q quantization groups.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from qarl.quant.kernels.base import KernelError
from qarl.quant.materialize import LowBitWeight


@triton.jit
def _kernel(
    x_at, words_at, scale_at, y_at, N, O, I, Q,  # noqa: E741
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One tile of y [N, O] = x [N, I] · (codes [O, I] · scale [O, Q])ᵀ. BLOCK_I divides GROUP: a scale a block."""
    per_word: tl.constexpr = 32 // BITS
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    total = tl.zeros((BLOCK_N, BLOCK_O), dtype=tl.float32)
    for start in range(0, I, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        x = tl.load(x_at + n[:, None] * I + i[None, :], mask=n[:, None] < N, other=0.0)
        at = o[None, :] * (I // per_word) + (i // per_word)[:, None]
        words = tl.load(words_at + at, mask=o[None, :] < O, other=0)
        codes = ((words >> ((i % per_word) * BITS)[:, None]) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
        scale = tl.load(scale_at + o * Q + start // GROUP, mask=o < O, other=0.0).to(tl.float32)
        total += tl.dot(x, codes.to(x.dtype), input_precision="ieee") * scale[None, :]
    y_tile = y_at + n[:, None] * O + o[None, :]
    tl.store(y_tile, total.to(y_at.dtype.element_ty), mask=(n[:, None] < N) & (o[None, :] < O))


def triton_multiply(layer: str, weight: LowBitWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    """x: compute dtype [N, I] → compute dtype [N, O]. Raises `KernelError` for columns no block size divides."""
    args, scale = weight.scheme.weights, weight.scale
    assert args is not None
    assert scale is not None
    (rows, columns), words = weight.shape, weight.codes
    group = weight.scheme.group_size or columns
    block = next((size for size in (64, 32, 16) if group % size == 0), None)
    if block is None:
        raise KernelError(
            f"layer {layer!r}: the Triton product takes scales over a multiple of 16 columns, not {group}; use "
            "'reference'"
        )
    launch: Any = _kernel

    def multiply(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
        block_n = 16 if x.shape[0] <= 16 else 64
        grid = (triton.cdiv(x.shape[0], block_n), triton.cdiv(rows, 64))
        launch[grid](
            x, words, scale, y, x.shape[0], rows, columns, columns // group,
            BITS=args.num_bits, GROUP=group, BLOCK_N=block_n, BLOCK_O=64, BLOCK_I=block,
        )  # fmt: skip
        return y

    return multiply
