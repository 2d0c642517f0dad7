"""Per-token activation quantization, held against vLLM's own operators, byte for byte."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.activations import quantize_activation
from quant.schemes import COMPUTE_DTYPES, get_scheme

on_cpu_builds = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's CPU operators are in its CPU build only")


@st.composite
def activations(draw: st.DrawFn, exponents: tuple[int, int] = (-30, 30)) -> torch.Tensor:
    """Compute dtype [N, I]: heavy tails at very different magnitudes a row, rows of zeros, exact rounding ties."""
    dtype = draw(st.sampled_from(list(COMPUTE_DTYPES.values())))
    tokens = draw(st.sampled_from((1, 3, 17)) | st.integers(1, 24))
    columns = draw(st.sampled_from((1, 3, 17, 33, 128, 257)) | st.integers(1, 300))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    normal = torch.randn(tokens, columns, generator=generator)
    if draw(st.booleans()):
        x = normal * torch.randn(tokens, columns, generator=generator).mul(draw(st.sampled_from((0.0, 1.0, 2.0)))).exp()
        x *= 10.0 ** torch.randint(*exponents, (tokens, 1), generator=generator)
    else:  # absmax 127 · 2^k: scale 2^k, every value a multiple of half a code
        x = (normal * 40).clamp(-127, 127).mul(2).round() / 2
        x[:, -1] = -127.0
        x *= 2.0 ** torch.randint(-6, 6, (tokens, 1), generator=generator)
    x[torch.rand(tokens, generator=generator) < draw(st.sampled_from((0.0, 0.4)))] = 0.0
    largest = torch.finfo(dtype).max * 0.99
    return x.clamp(-largest, largest).to(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@on_cpu_builds
@given(activations())
@settings(max_examples=300, deadline=None)
def test_int8_is_vllms_dynamic_quantization(x: torch.Tensor):
    """Contract: codes and scales are those of vLLM's CPU kernel `dynamic_scaled_int8_quant`, so backward sees what
    the product multiplied. Blind spot: the kernel has one code path per instruction set; this machine's is tested."""
    from vllm._custom_ops import onednn_scaled_int8_quant

    codes, scale, _ = onednn_scaled_int8_quant(x)
    ours = quantize_activation(x, get_scheme("w8a8"))
    assert ours.codes.dtype == torch.int8 and ours.scale.dtype == torch.float32
    assert torch.equal(as_bytes(ours.scale), as_bytes(scale))
    assert torch.equal(ours.codes, codes)


@pytest.fixture(scope="module")
def vllm_fp8() -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        return QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)


@on_cpu_builds
@given(x=activations())
@settings(max_examples=300, deadline=None)
def test_fp8_is_vllms_dynamic_quantization(
    vllm_fp8: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
):
    """The same for fp8 e4m3 and vLLM's `QuantFP8`, per token."""
    codes, scale = vllm_fp8(x)
    ours = quantize_activation(x, get_scheme("fp8"))
    assert ours.codes.dtype == codes.dtype == torch.float8_e4m3fn
    assert torch.equal(as_bytes(ours.scale), as_bytes(scale))
    assert torch.equal(as_bytes(ours.codes), as_bytes(codes))


@given(activations(exponents=(-3, 3)))
@settings(max_examples=100, deadline=None)
def test_codes_are_the_nearest(x: torch.Tensor):
    """Without vLLM: int8 values come back within half a code, fp8 within half of its spacing (2^-4 of the value, or
    half of the smallest code, 2^-10, near zero). The largest of a row has the largest code; in fp8 only from
    absmax 1/512 up, where vLLM's smallest scale ends."""
    wide = x.double()
    int8 = quantize_activation(x, get_scheme("w8a8"))
    back = int8.codes.double() * int8.scale.double()
    assert ((back - wide).abs() <= int8.scale * 0.50001).all()
    used = x.abs().amax(-1) > 0
    assert (int8.codes.int().abs().amax(-1)[used] == 127).all() and (int8.codes[~used] == 0).all()
    fp8 = quantize_activation(x, get_scheme("fp8"))
    error = (fp8.codes.double() * fp8.scale.double() - wide).abs()
    assert (error <= torch.maximum(wide.abs() * 2.0**-4, fp8.scale * 2.0**-10) * 1.00001).all()
    full = x.float().abs().amax(-1) > 1 / 512
    assert (fp8.codes.float().abs().amax(-1)[full] == 448).all() and (fp8.codes.float()[~used] == 0).all()


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_zero_rows_and_dequantization(name: str, dtype: torch.dtype):
    """A row of zeros gives zeros and a finite scale; dequantized(dtype) is the fp32 product rounded once; tokens do
    not see each other."""
    x = torch.randn(4, 37, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] = 0.0
    low_bit = quantize_activation(x, get_scheme(name))
    assert low_bit.scale.shape == (4, 1) and low_bit.scale.isfinite().all()
    for out in (torch.float32, dtype):
        expected = torch.stack([low_bit.codes[n].float() * low_bit.scale[n, 0] for n in range(4)]).to(out)
        assert torch.equal(low_bit.dequantized(out), expected) and (expected[1] == 0).all()
    for n in range(4):
        alone = quantize_activation(x[n : n + 1], get_scheme(name))
        assert torch.equal(as_bytes(alone.codes[0]), as_bytes(low_bit.codes[n]))


@pytest.mark.parametrize("name", ["bf16", "w4a16"])
def test_schemes_without_activation_quantization_are_refused(name: str):
    with pytest.raises(AssertionError, match=f"'{name}' does not quantize activations"):
        quantize_activation(torch.ones(1, 4), get_scheme(name))
