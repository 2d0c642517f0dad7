"""Master weight → codes and scales, held against compressed-tensors' own quantizer, byte for byte."""

import re

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.materialize import LowBitWeight, materialize
from quant.schemes import COMPUTE_DTYPES, MASTER_DTYPES, Scheme, SchemeError, get_scheme, is_integer

QUANTIZED = ("w4a16", "w8a8", "fp8")
LARGEST = 1.9375 * 2.0**127  # 3.3e38, a bfloat16

compute_dtypes = st.sampled_from(list(COMPUTE_DTYPES.values()))
master_dtypes = st.sampled_from(list(MASTER_DTYPES.values()))
finite_floats = st.floats(-LARGEST, LARGEST, width=32)


@st.composite
def masters(draw: st.DrawFn, scheme: Scheme, exponents: tuple[int, int] = (-44, 36)) -> torch.Tensor:
    """A weight [O, I] the scheme can hold: heavy tails or exact rounding ties, zeros, and chosen single values."""
    group = scheme.group_size
    outputs = draw(st.sampled_from((1, 3, 17)) | st.integers(1, 24))
    inputs = group * draw(st.integers(1, 3)) if group else draw(st.sampled_from((1, 3, 17)) | st.integers(1, 200))
    per_scale = group or inputs
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    normal = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        tail = draw(st.sampled_from((0.0, 1.0, 3.0)))
        weight = normal * (tail * torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)).exp()
        weight *= 10.0 ** draw(st.integers(*exponents))
    else:  # half-integer multiples of a power-of-two scale: every rounding is exact or a tie
        half_range = 7.5 if scheme.name == "w4a16" else 127.5 if scheme.name == "w8a8" else 448.0
        weight = (normal * half_range / 3).clamp(-half_range, half_range).mul(2).round() / 2
        weight[:, ::per_scale] = half_range * draw(st.sampled_from((-1, 1)))
        weight *= 2.0 ** draw(st.integers(-20, 20))
    holes = torch.rand(outputs, inputs // per_scale, generator=generator) < draw(st.sampled_from((0.0, 0.4)))
    weight[holes.repeat_interleave(per_scale, dim=1)] = 0.0
    single = torch.tensor(draw(st.lists(finite_floats, max_size=min(4, outputs * inputs))), dtype=torch.float64)
    weight.view(-1)[torch.randperm(outputs * inputs, generator=generator)[: len(single)]] = single
    return weight.clamp(-LARGEST, LARGEST).to(draw(master_dtypes))


def library(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors' codes [O, I], one per element, and stored scale [O, Q]."""
    args = scheme.weights
    assert args is not None
    grouped = weight.unflatten(1, (-1, scheme.group_size or weight.shape[1]))
    scale, _ = calculate_qparams(*torch.aminmax(grouped, dim=-1), args)
    scale = scale.to(dtype)
    stored = torch.int8 if is_integer(args) else torch.float8_e4m3fn
    codes = quantize(weight, scale, None, args, dtype=stored)  # pyright: ignore[reportArgumentType]
    return codes, scale


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def per_element(low_bit: LowBitWeight, values: torch.Tensor) -> torch.Tensor:
    """[O, Q] → [O, I]."""
    return values.repeat_interleave(low_bit.shape[1] // values.shape[1], dim=1)


def check_against_library(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> None:
    codes, scale = library(weight, scheme, dtype)
    if not torch.isfinite(scale).all():  # the library stores the overflow; materialize refuses it
        with pytest.raises(ValueError, match="a scale beyond"):
            materialize(weight, scheme, dtype)
        return
    low_bit = materialize(weight, scheme, dtype)
    assert low_bit.scale is not None and low_bit.scale.dtype == dtype and low_bit.scale.shape == scale.shape
    kept = scale != 0  # the library divides by a scale that vanished in the cast; see the test of those groups
    assert torch.equal(as_bytes(low_bit.scale[kept]), as_bytes(scale[kept]))
    kept_codes = per_element(low_bit, kept)
    unpacked = low_bit.unpacked()
    assert unpacked.dtype == codes.dtype and unpacked.shape == weight.shape
    assert torch.equal(as_bytes(unpacked[kept_codes]), as_bytes(codes[kept_codes]))
    if kept.all():
        stored = pack_to_int32(codes, 4) if scheme.name == "w4a16" else codes
        assert low_bit.codes.dtype == stored.dtype and low_bit.codes.shape == stored.shape
        assert torch.equal(as_bytes(low_bit.codes), as_bytes(stored))


@given(st.data())
@settings(max_examples=1000, deadline=None)
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_and_scales_are_the_librarys_bytes(name: str, data: st.DataObject):
    """Contract: materialize = `calculate_qparams` + cast to the compute dtype + `quantize` + `pack_to_int32`, bit for
    bit, over awkward shapes, both master and compute dtypes, magnitudes from 1e-44 to 3e38, ties and zero groups.
    Blind spot: the library is called per tensor here; that the engine unpacks alike is the publish tests' link."""
    scheme = get_scheme(name)
    check_against_library(data.draw(masters(scheme)), scheme, data.draw(compute_dtypes))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_views_and_large_layers_are_the_librarys_bytes(name: str, dtype: torch.dtype):
    """The same for a layer of ordinary size, and for a parameter that requires gradients."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(257, 1024, generator=generator) * torch.randn(257, 1024, generator=generator).exp() * 0.02
    check_against_library(weight, get_scheme(name), dtype)
    low_bit = materialize(torch.nn.Parameter(weight), get_scheme(name), dtype)
    assert low_bit.scale is not None and not low_bit.codes.requires_grad and not low_bit.scale.requires_grad


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("master", MASTER_DTYPES.values())
@pytest.mark.parametrize("magnitude", [1e-7, 3e-8, 1e-9, 1e-20])
def test_groups_whose_float16_scale_vanishes_stay_close_to_zero(name: str, master: torch.dtype, magnitude: float):
    """Contract: where absmax / half-range rounds to zero in float16 (below 2^-25) the library divides by zero. Here
    the scale is 2^-23, so results are finite; codes are still the master divided by that scale, and the dequantized
    weight stays within one code of the master: as tiny as it was. The ordinary row beside it is not touched."""
    scheme = get_scheme(name)
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    weight[1] *= magnitude / 3
    weight = weight.to(master)
    low_bit = materialize(weight, scheme, torch.float16)
    vanished = library(weight, scheme, torch.float16)[1] == 0
    assert vanished[1].all() and not vanished[::2].any()
    assert low_bit.scale is not None and (low_bit.scale[1] == 2.0**-23).all()
    dequantized = low_bit.dequantized()
    assert dequantized.isfinite().all()
    assert (dequantized[1] - weight[1].float()).abs().max() <= 2.0**-23 / 2
    check_against_library(weight[::2], scheme, torch.float16)
    tiniest = materialize(torch.full((2, 128), 1e-12, dtype=master), scheme, torch.float16)
    assert (tiniest.dequantized().abs() < 1e-9).all()


@given(st.data())
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantized_is_code_times_scale_rounded_once(name: str, data: st.DataObject):
    """dequantized(dtype) = code · scale, exact (computed here in float64), rounded once to dtype."""
    scheme = get_scheme(name)
    compute = data.draw(compute_dtypes)
    low_bit = materialize(data.draw(masters(scheme, exponents=(-20, 4)).filter(_ordinary)), scheme, compute)
    assert low_bit.scale is not None
    exact = low_bit.unpacked().to(torch.float64) * per_element(low_bit, low_bit.scale).to(torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(low_bit.dequantized(dtype), exact.to(dtype))
    assert low_bit.dequantized().dtype == torch.float32


def _ordinary(weight: torch.Tensor) -> bool:
    """Small enough for a finite float16 scale."""
    return bool(weight.abs().max() < 1e5)


@given(st.integers(1, 20), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_int4_codes_survive_packing(outputs: int, groups: int, seed: int):
    """unpacked() gives back every int4 code, [-8, 7] in every nibble position. The weight is code + noise below a
    half, scale 1 (absmax 7.5 in each group), so the codes are known without any quantizer."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-7, 8, (outputs, 128 * groups), generator=generator)
    weight = codes + (torch.rand(codes.shape, generator=generator) - 0.5) * 0.9
    weight = weight.clamp(-7.5, 7.5)
    weight[:, 5::128] = -7.5  # absmax: scale 1; a tie between -8 and -7, to even
    codes[:, 5::128] = -8
    low_bit = materialize(weight, get_scheme("w4a16"), torch.bfloat16)
    assert low_bit.scale is not None and (low_bit.scale == 1).all()
    assert torch.equal(low_bit.unpacked(), codes.to(torch.int8))
    words = low_bit.codes.to(torch.int64) & 0xFFFFFFFF
    for position in range(8):
        assert torch.equal((words >> (4 * position) & 15) - 8, codes[:, position::8])


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_tensors_have_checkpoint_names_dtypes_and_shapes(dtype: torch.dtype):
    """What a checkpoint holds of a layer [48, 384], per scheme, in order."""
    weight = torch.randn(48, 384, generator=torch.Generator().manual_seed(0))

    def held(name: str) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        low_bit = materialize(weight, get_scheme(name), dtype)
        assert low_bit.shape == (48, 384)
        return [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in low_bit.tensors()]

    assert held("bf16") == [("weight", dtype, (48, 384))]
    assert held("w8a8") == [("weight", torch.int8, (48, 384)), ("weight_scale", dtype, (48, 1))]
    assert held("fp8") == [("weight", torch.float8_e4m3fn, (48, 384)), ("weight_scale", dtype, (48, 1))]
    assert held("w4a16") == [
        ("weight_packed", torch.int32, (48, 48)),
        ("weight_scale", dtype, (48, 3)),
        ("weight_shape", torch.int64, (2,)),
    ]
    shape = dict(materialize(weight, get_scheme("w4a16"), dtype).tensors())["weight_shape"]
    assert shape.tolist() == [48, 384]


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_the_unquantized_scheme_only_casts(dtype: torch.dtype):
    weight = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    low_bit = materialize(weight, get_scheme("bf16"), dtype)
    assert low_bit.scale is None
    assert torch.equal(low_bit.codes, weight.to(dtype)) and torch.equal(low_bit.unpacked(), low_bit.codes)
    assert torch.equal(low_bit.dequantized(), weight.to(dtype).float())


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("master", MASTER_DTYPES.values())
def test_non_finite_weights_are_refused(name: str, bad: float, master: torch.dtype):
    """One NaN or infinity anywhere raises; it would be published as an ordinary-looking code otherwise."""
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(master)
    weight[2, 200] = bad
    with pytest.raises(ValueError, match=r"NaN or infinity .* resume from a checkpoint"):
        materialize(weight, get_scheme(name), torch.bfloat16)


@pytest.mark.parametrize("columns", [1, 64, 127, 136, 192, 1000])
def test_a_width_the_group_does_not_divide_is_refused(columns: int):
    """The error names scheme, layer, both sizes and what to choose instead; nothing is padded silently."""
    scheme = get_scheme("w4a16")
    said = f"'w4a16': layer 'model.layers.3.mlp.up_proj' has {columns} input columns, no multiple of the group size 128"
    with pytest.raises(SchemeError, match=re.escape(said) + ".*'w8a8'.*'bf16'"):
        scheme.check_layer("model.layers.3.mlp.up_proj", (40, columns))
    with pytest.raises(SchemeError, match=rf"{columns} input columns.*128"):
        materialize(torch.ones(2, columns), scheme, torch.bfloat16)
    for name in ("w8a8", "fp8", "bf16"):
        get_scheme(name).check_layer("model.layers.3.mlp.up_proj", (40, columns))


def test_a_scale_beyond_float16_is_refused_with_the_remedy():
    weight = torch.full((1, 128), 6e5)
    with pytest.raises(ValueError, match=r"magnitude 6e\+05 .* beyond torch\.float16's range; use bfloat16"):
        materialize(weight, get_scheme("w4a16"), torch.float16)
    assert torch.isfinite(materialize(weight, get_scheme("w4a16"), torch.bfloat16).dequantized()).all()
