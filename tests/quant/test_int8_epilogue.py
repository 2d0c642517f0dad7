"""The roundings after an int8 product: those of vLLM's GPU kernels, written out in fp32, against
what CPUs compute.

Sums of int8 products are exact in int32 in any order, so a tile, a split or the number of rows
changes no bit of them. What follows is elementwise: two scales, a bias, one rounding. Formulas are
read from vLLM's sources: `csrc/libtorch_stable/cutlass_extensions/epilogue/
scaled_mm_epilogues_c2x.hpp` (compute capability 8.0 and 8.9) and `…_c3x.hpp` (9.0), which agree,
and `triton_scaled_mm`, which vLLM takes for shapes that are no multiple of 16.

Blind spot: the compiled kernels themselves, which no CPU can run.

Axes: N tokens, O output rows, I input columns.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops

from qarl.quant.kernels.vllm_cpu.int8 import CPUInt8ScaledMMFp32Kernel
from tests.support.profiles import examples

_SMALL = 64
"""Largest magnitude of a weight's code. Without VNNI oneDNN adds two products in 16 bits, where
products of larger codes do not fit.
"""


def cutlass(
    total: torch.Tensor, row_scale: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return round(row_scale · (scale · total)): CUTLASS's epilogue without a bias.

    total: int32 [N, O]; row_scale: fp32 [N, 1], of tokens; scale: fp32 [O], of output rows.
    """
    return (row_scale * (scale * total.float())).to(dtype)


def triton(
    total: torch.Tensor, row_scale: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return round(scale · (row_scale · total)): `triton_scaled_mm`'s epilogue without a bias."""
    return (scale * (row_scale * total.float())).to(dtype)


def drawn(
    seed: int, tokens: int, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes int8 [N, I] and [O, I] and scales fp32 [N, 1] and [O] over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    # Codes of one sign in some rows, so that sums exceed 2^24 and their conversion rounds.
    x = torch.randint(
        -127,
        128,
        (tokens, columns),
        generator=generator,
        dtype=torch.int8,
    )
    x[0] = x[0].abs()
    weight = torch.randint(
        -_SMALL,
        _SMALL,
        (rows, columns),
        generator=generator,
        dtype=torch.int8,
    )
    weight[0] = weight[0].abs()
    row_scale = torch.rand(tokens, 1, generator=generator).exp2() * 2.0**-9
    scale = torch.randn(rows, generator=generator).mul(3).exp2() * 2.0**-9
    return x, weight, row_scale, scale


def onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_scale: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return vLLM's product on CPUs, dtype [N, O]."""
    handler = ops.create_onednn_scaled_mm(weight.t(), scale, dtype, True, False, 16)
    output = torch.empty(len(x), len(weight), dtype=dtype)
    ops.onednn_scaled_mm(handler, x, output, row_scale, None, None, None)
    return output


def rounded(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return y, fp32, in `dtype` as vLLM's C++ code on CPUs converts it.

    Without AVX512-BF16 it cuts a bfloat16's lower bits off. GPUs and our own kernel round.
    """
    if dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return (y.view(torch.int32) >> 16).to(torch.int16).view(dtype)
    return y.to(dtype)


ANY_LAYER = given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 9),
    rows=st.integers(1, 70),
    columns=st.sampled_from([1, 31, 576, 5000]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@ANY_LAYER
@settings(max_examples=examples(30), deadline=None)
def test_the_product_on_cpus_scales_as_cutlass_does(
    dtype: torch.dtype, seed: int, tokens: int, rows: int, columns: int
):
    x, weight, row_scale, scale = drawn(seed, tokens, rows, columns)
    total = x.int() @ weight.int().t()
    expected = rounded(cutlass(total, row_scale, scale, torch.float32), dtype)
    assert torch.equal(onednn(x, weight, row_scale, scale, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ANY_LAYER
@settings(max_examples=examples(30), deadline=None)
def test_the_product_on_cpus_without_vnni_is_cutlass_s(
    dtype: torch.dtype, seed: int, tokens: int, rows: int, columns: int
):
    """Contract: QaRL's kernel for such CPUs returns, of an input, the bits of CUTLASS's formula."""
    codes, weight, _, scale = drawn(seed, tokens, rows, columns)
    x = codes.to(dtype) / 16
    kernel: Any = object.__new__(CPUInt8ScaledMMFp32Kernel)
    layer = weight.float(), scale[:, None], None, None, None
    kernel._get_layer_params = lambda _: layer
    quantized, row_scale, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    total = quantized.int() @ weight.int().t()
    expected = cutlass(total, row_scale, scale, dtype)
    assert torch.equal(kernel._apply_in_fp32(None, x), expected)


def test_the_orders_of_scales_are_two_roundings():
    """CUTLASS and Triton part, so the tests above can tell one from the other."""
    x, weight, row_scale, scale = drawn(0, 9, 70, 576)
    total = x.int() @ weight.int().t()
    first = cutlass(total, row_scale, scale, torch.float32)
    assert not torch.equal(first, triton(total, row_scale, scale, torch.float32))
