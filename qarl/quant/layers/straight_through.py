"""The two products of a straight-through backward, and what is rounded in them.

dx = dy · Ŵ    Ŵ and the sum rounded to the dtype of `dy`, sums in fp32; or everything in fp32 and
the sum rounded. dW = dyᵀ · x̂   operands as they are: products of 16-bit values are exact in fp32,
sums and result are fp32. On CUDA the
               values that low-bit activations stand for are rounded to the dtype of `dy`, for its
               tensor cores:
               |error| ≤ u · Σ_n |dy| |x̂| more, which is what a `dy` of that dtype leaves open anyway.

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Sequence

import torch

from qarl.quant.layers.gradients import Gradients
from qarl.quant.materialize.activations import LowBitActivation

_BLOCK = 1 << 20
_TOKENS = 1024
"""Elements of `dy`, and tokens, that are widened at once on CPUs: those have no product of 16-bit
values with an fp32 result.
"""

LARGEST_PRODUCT = 1 << 25
"""Elements of dW that CUDA has beside `total` at once, 128 MiB: an output head's whole one is
gigabytes.
"""


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has units for products of this dtype with sums in fp32. Of float16 on CPUs
    torch has slow ones alone, of bfloat16 on those without AVX512-BF16 or AMX as well.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def input_gradient(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Σ dy · Ŵ over parts: dy, compute dtype [N, O], and weight, Ŵ [O, I] → compute dtype [N, I].

    The weight's dtype is that of the product's operands. fp32: the exact Ŵ, nothing is rounded but
    the sum. The compute dtype, of unit roundoff u: |error| ≤ u · Σ_o |dy| |Ŵ| more for each part,
    from Ŵ's own rounding, none where the dtype holds Ŵ, and the sum so far is rounded with each.
    """
    (dy, weight), *others = parts
    total = dy.to(weight.dtype) @ weight
    for rows, weight in others:
        total.addmm_(rows.to(weight.dtype), weight)
    return total.to(dy.dtype)


def add_weight_gradient(
    total: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor | LowBitActivation,
    gradients: Gradients,
) -> None:
    """total += dyᵀ · x / scale. total: fp32 [O, I]. dy: fp32 or compute dtype [N, O]. x: [N, I] as
    multiplied, fp32, compute dtype or low bits.
    """
    unscale = 1.0 / gradients.scale
    if dy.is_cuda and dy.dtype != torch.float32:
        dy_rows, x_fp32 = _operands(dy, x)
        rows = max(1, LARGEST_PRODUCT // x_fp32.shape[1])
        for into, part in zip(total.split(rows), dy_rows.split(rows), strict=True):
            into.add_(product_in_fp32(part, x_fp32), alpha=unscale)
        return
    whole = dy.is_cuda or dy.dtype == x.dtype == torch.float32
    tokens, rows = (max(1, dy.shape[0]), dy.shape[1]) if whole else (_TOKENS, _BLOCK // _TOKENS)
    for dy_part, x_part in zip(dy.split(tokens), x.split(tokens), strict=True):
        x_fp32 = (
            x_part.dequantized(torch.float32)
            if isinstance(x_part, LowBitActivation)
            else x_part.to(torch.float32)
        )
        for into, part in zip(total.split(rows), dy_part.split(rows, dim=1), strict=True):
            into.addmm_(part.to(torch.float32).t(), x_fp32, alpha=unscale)


def _operands(
    dy: torch.Tensor, x: torch.Tensor | LowBitActivation
) -> tuple[torch.Tensor, torch.Tensor]:
    """dyᵀ [O, N] and x [N, I] for tensor cores: of one 16-bit dtype, or both fp32 where x is."""
    if isinstance(x, LowBitActivation):
        return dy.t(), x.dequantized(dy.dtype)
    wider = torch.promote_types(dy.dtype, x.dtype)
    return dy.to(wider).t(), x.to(wider)


def product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b with fp32 sums, fp32 [O, I]. a: [O, N], b: [N, I], of one dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)
