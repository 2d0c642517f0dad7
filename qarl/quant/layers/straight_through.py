"""The two products of a straight-through backward, and the roundings in them.

dx = dy · Ŵ: Ŵ and the sum are rounded to the dtype of `dy`, with sums in fp32; or everything is in
fp32 and only the sum is rounded.

dW = dyᵀ · x̂: 16-bit operands are not rounded. Their products are exact in fp32; sums and result
are fp32. Where the device has units for products of the dtype of `dy` (CUDA's tensor cores, AMX or
AVX512-BF16), the values for which low-bit activations stand are rounded to that dtype. That adds an
error of |error| ≤ u · Σ_n |dy| |x̂|, which is no more than a `dy` of that dtype leaves open anyway.

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from qarl.quant.layers.gradients import Gradients
from qarl.quant.limits import LARGEST_PRODUCT
from qarl.quant.materialize.activations import LowBitActivation

_BLOCK = 1 << 20
"""Number of elements of `dy` that are widened to fp32 at once on CPUs, where torch has no product
of 16-bit tensors with an fp32 result.
"""

_TOKENS = 1024
"""Number of tokens that are widened to fp32 at once on CPUs."""


def multiplies_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device has units for products of this dtype with sums in fp32.

    On CPUs torch has only slow products of float16, and of bfloat16 too without AVX512-BF16 or AMX.
    """
    if device.type != "cpu" or dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def input_values(x: torch.Tensor | LowBitActivation, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of an input as it was multiplied, rounded once to `dtype`."""
    return x.dequantized(dtype) if isinstance(x, LowBitActivation) else x.to(dtype)


def input_gradient(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return Σ dy · Ŵ over parts, compute dtype [N, I].

    The weight's dtype is that of the product's operands. In fp32 Ŵ is exact and only the sum is
    rounded. In the compute dtype, of unit roundoff u, each part adds an error |error| ≤ u · Σ_o
    |dy| |Ŵ| from Ŵ's own rounding (none if the dtype holds Ŵ), and the sum so far is rounded with
    each part.

    Args:
        parts: (dy, compute dtype [N, O]; weight Ŵ [O, I]) of each part.
    """
    (first_dy, first_weight), *more = parts
    total = first_dy.to(first_weight.dtype) @ first_weight
    for dy, weight in more:
        total.addmm_(dy.to(weight.dtype), weight)
    return total.to(first_dy.dtype)


def add_weight_gradient(
    total: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor | LowBitActivation,
    gradients: Gradients,
) -> None:
    """Add dyᵀ · x / scale to `total`, in place.

    Args:
        total: fp32 [O, I].
        dy: fp32 or compute dtype [N, O].
        x: [N, I] as multiplied; fp32, compute dtype or low bits.
        gradients: has the scale.
    """
    unscale = 1.0 / gradients.scale
    if dy.is_cuda and dy.dtype != torch.float32:
        dy_rows, x_values = _operands(dy, x)
        rows = max(1, LARGEST_PRODUCT // x_values.shape[1])
        for total_part, dy_part in zip(total.split(rows), dy_rows.split(rows), strict=True):
            total_part.add_(product_in_fp32(dy_part, x_values), alpha=unscale)
        return
    if dy.is_cuda or dy.dtype == x.dtype == torch.float32:
        # one product of everything
        tokens = max(1, dy.shape[0])
        rows = dy.shape[1]
    else:
        tokens = _TOKENS
        rows = _BLOCK // _TOKENS
    x_dtype = dy.dtype if isinstance(x, LowBitActivation) else x.dtype
    in_bf16 = dy.dtype == x_dtype == torch.bfloat16 and multiplies_natively(dy.dtype, dy.device)
    with _bf16_units() if in_bf16 else nullcontext():
        for dy_tokens, x_part in zip(dy.split(tokens), x.split(tokens), strict=True):
            x_fp32 = input_values(x_part, torch.float32)
            for total_part, dy_part in zip(
                total.split(rows), dy_tokens.split(rows, dim=1), strict=True
            ):
                total_part.addmm_(dy_part.to(torch.float32).t(), x_fp32, alpha=unscale)


@contextmanager
def _bf16_units() -> Iterator[None]:
    """Let CPUs multiply fp32 tensors by their bfloat16 units, with sums and results in fp32.

    oneDNN rounds the operands to bfloat16, which changes nothing in values that came from it. The
    setting is torch's and holds for the whole process, so no other thread may multiply meanwhile:
    an engine in this process samples in the thread that learns.
    """
    setting = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _operands(
    dy: torch.Tensor, x: torch.Tensor | LowBitActivation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dyᵀ [O, N] and x [N, I] for tensor cores.

    Both have one 16-bit dtype, or fp32 if x has it.
    """
    if isinstance(x, LowBitActivation):
        return dy.t(), x.dequantized(dy.dtype)
    wider = torch.promote_types(dy.dtype, x.dtype)
    return dy.to(wider).t(), x.to(wider)


def product_in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a · b with fp32 sums, fp32 [O, I].

    a: [O, N]. b: [N, I]. Both have one dtype.
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)
