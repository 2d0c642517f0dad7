"""Tests of per-token activation quantization against vLLM's own operators, byte for byte."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, get_scheme
from tests.support.profiles import examples
from tests.support.tensors import as_bytes, relative_error, seeded

on_cpu_builds = pytest.mark.skipif(
    torch.cuda.is_available(), reason="vLLM's CPU operators are in its CPU build only"
)


@st.composite
def activations(
    draw: st.DrawFn, exponents: tuple[int, int] = (-30, 30), multiple: int = 1
) -> torch.Tensor:
    """Draw activations [N, I] in the compute dtype with heavy tails, very different magnitudes per
    row, rows of zeros and exact rounding ties. The column count I is a multiple of `multiple`.
    """
    dtype = draw(st.sampled_from(list(COMPUTE_DTYPES.values())))
    tokens = draw(st.sampled_from((1, 3, 17)) | st.integers(1, 24))
    special_columns = st.sampled_from((1, 3, 17, 33, 128, 257))
    columns = draw(special_columns | st.integers(1, 300))
    if multiple > 1:
        columns = multiple * (1 + columns % 3)
    generator = seeded(draw(st.integers(0, 2**32 - 1)))
    normal = torch.randn(tokens, columns, generator=generator)
    if draw(st.booleans()):
        tail = torch.randn(tokens, columns, generator=generator)
        x = normal * tail.mul(draw(st.sampled_from((0.0, 1.0, 2.0)))).exp()
        x *= 10.0 ** torch.randint(*exponents, (tokens, 1), generator=generator)
    else:  # absmax 127 · 2^k: scale 2^k, every value a multiple of half a code
        x = (normal * 40).clamp(-127, 127).mul(2).round() / 2
        x[:, -1] = -127.0
        x *= 2.0 ** torch.randint(-6, 6, (tokens, 1), generator=generator)
    uniform = torch.rand(tokens, generator=generator)
    x[uniform < draw(st.sampled_from((0.0, 0.4)))] = 0.0
    largest = torch.finfo(dtype).max * 0.99
    return x.clamp(-largest, largest).to(dtype)


@functools.cache
def vllm_fp8(group_columns: int) -> Any:
    """Quantize by vLLM's `QuantFP8` over groups of this many columns; -1 means
    over whole tokens.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        return QuantFP8(static=False, group_shape=GroupShape(1, group_columns))


@on_cpu_builds
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("w8a8", torch.int8), ("fp8", torch.float8_e4m3fn)],
)
@given(x=activations())
@settings(max_examples=examples(300))
def test_codes_of_tokens_are_vllms_dynamic_quantization(
    scheme: str, dtype: torch.dtype, x: torch.Tensor
):
    """Contract: codes and scales are those of vLLM's CPU kernel `dynamic_scaled_int8_quant` and of
    its `QuantFP8`, so the backward sees what the product multiplied. Blind spot: the kernel's code
    paths for other instruction sets than this machine's.
    """
    from vllm._custom_ops import onednn_scaled_int8_quant

    codes, scale, *_ = onednn_scaled_int8_quant(x) if scheme == "w8a8" else vllm_fp8(-1)(x)
    ours = quantize_activation(x, get_scheme(scheme))
    assert ours.codes.dtype == codes.dtype == dtype
    assert ours.scale.dtype == torch.float32
    assert torch.equal(as_bytes(ours.scale), as_bytes(scale))
    # without AVX-512 codes of a token of zeros are -128, times a scale of 0
    counted = (scale > 0).view(-1, 1)
    assert torch.equal(as_bytes(ours.codes) * counted, as_bytes(codes) * counted)


@on_cpu_builds
@given(
    activations(exponents=(-6, 6), multiple=128),
    st.sampled_from([0.0, 1.0, -30.0]),
)
@settings(max_examples=examples(200))
def test_int8_asymmetric_is_what_the_int4_product_multiplies(x: torch.Tensor, offset: float):
    """Contract: (code - zero point) · scale is, bit for bit, the activation that torch's
    `_dyn_quant_matmul_4bit` multiplies, which vLLM's kernel calls. The operator does not return its
    codes, so it multiplies x by the identity (codes of 1, scale 1), for which every sum has one
    term.
    """
    x = (x.float() + offset).to(x.dtype)
    columns = x.shape[1]
    identity = torch.eye(columns, dtype=torch.uint8) + 8
    pairs = identity[:, 0::2] | (identity[:, 1::2] << 4)
    scales = torch.ones(columns, columns // 128, dtype=torch.bfloat16)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scales, None, 128, columns, columns)
    seen = torch.ops.aten._dyn_quant_matmul_4bit(x.float(), packed, 128, columns, columns)
    ours = quantize_activation(x, get_scheme("w4a8"))
    assert ours.codes.dtype == torch.int8
    assert ours.zero_point is not None
    assert torch.equal(ours.dequantized(torch.float32), seen)


@on_cpu_builds
@given(x=activations(multiple=128))
@settings(max_examples=examples(200))
def test_fp8_groups_are_vllms(x: torch.Tensor):
    """Contract: fp8 in token groups of 128 equals vLLM's `QuantFP8` for groups whose absmax is at
    least 1/512. Below that, this implementation of vLLM's has a minimum scale that its CUDA kernel,
    which the product follows, does not have.
    """
    codes, scale = vllm_fp8(128).forward_native(x)
    ours = quantize_activation(x, get_scheme("fp8-block"))
    assert ours.scale.shape == scale.shape
    groups = x.float().abs().unflatten(-1, (-1, 128))
    large = groups.amax(-1) >= 1 / 512
    assert torch.equal(ours.scale[large], scale[large])
    chosen = large.repeat_interleave(128, dim=1)
    assert torch.equal(as_bytes(ours.codes)[chosen], as_bytes(codes)[chosen])


@on_cpu_builds
@given(x=activations(exponents=(-8, 8), multiple=16))
@settings(max_examples=examples(200))
def test_e2m1_groups_are_vllms(x: torch.Tensor):
    """Contract: NVFP4 values and scales equal those of vLLM's `ref_nvfp4_quant` under the constant
    global scale.
    """
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        ref_nvfp4_quant,
    )

    values, scale = ref_nvfp4_quant(x, torch.tensor(get_scheme("nvfp4").input_global_scale), 16)
    ours = quantize_activation(x, get_scheme("nvfp4"))
    assert ours.codes.dtype == torch.uint8
    assert ours.codes.shape == (
        x.shape[0],
        x.shape[1] // 2,
    )
    assert torch.equal(ours.scale.float(), scale)
    assert torch.equal(ours.values(), values)


ACTIVATION_SCHEMES = [name for name, scheme in SCHEMES.items() if scheme.activations is not None]
GROUPS = {"fp8-block": 128, "nvfp4": 16}


@pytest.mark.parametrize("name", ACTIVATION_SCHEMES)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_zero_rows_have_finite_scales_and_dequantize_to_zeros(name: str, dtype: torch.dtype):
    """Contract: rows of zeros give zeros and finite scales. dequantized(dtype) is the fp32 product
    rounded once, per token.
    """
    columns = 2 * GROUPS.get(name, 18)
    x = torch.randn(4, columns, generator=seeded(0)).to(dtype)
    x[1] = 0.0
    low_bit = quantize_activation(x, get_scheme(name))
    assert low_bit.scale.shape == (4, columns // GROUPS.get(name, columns))
    assert low_bit.scale.float().isfinite().all()
    assert name != "fp8-block" or float(low_bit.scale[1, 0]) == pytest.approx(
        1e-10 / 448, rel=1e-5, abs=0
    )
    scale = low_bit.scale.float().repeat_interleave(
        columns // low_bit.scale.shape[1],
        dim=1,
    )
    for out in (torch.float32, dtype):
        expected = (low_bit.values() * scale).to(out)
        assert torch.equal(low_bit.dequantized(out), expected)
        assert (expected[1] == 0).all()
    assert relative_error(low_bit.dequantized(torch.float32), x.float()) < 0.12
    for n in range(4):
        alone = quantize_activation(x[n : n + 1], get_scheme(name))
        assert torch.equal(as_bytes(alone.codes[0]), as_bytes(low_bit.codes[n]))
