"""Tests of materialization, master weight → codes and scales, against compressed-tensors' own
quantizer and compressors, byte for byte. Fused experts are compared expert by expert on each
expert's own matrices.
"""

import re
from contextlib import nullcontext

import pytest
import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import preset_name_to_scheme
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.configs.schemes import SCHEME_SPECS
from qarl.quant.checkpoint.families import ExpertLayout
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.materialize.experts import LowBitExperts, materialize_experts
from qarl.quant.schemes import (
    COMPUTE_DTYPES,
    MASTER_DTYPES,
    SCHEMES,
    Scheme,
    SchemeError,
    get_scheme,
    scheme_of_args,
    write_quantization_config,
)
from tests.support.library import FP4, library, library_scale
from tests.support.profiles import examples
from tests.support.tensors import as_bytes, heavy, same_bits, seeded

QUANTIZED = tuple(name for name in SCHEMES if name != "bf16")
STORES_COMPUTE_SCALES = tuple(name for name in QUANTIZED if name not in FP4)
LARGEST = 1.9375 * 2.0**127  # 3.3e38, a bfloat16

compute_dtypes = st.sampled_from(list(COMPUTE_DTYPES.values()))
master_dtypes = st.sampled_from(list(MASTER_DTYPES.values()))
finite_floats = st.floats(-LARGEST, LARGEST, width=32)


def half_range(scheme: Scheme) -> float:
    """Return absmax / scale of an integer or fp8 scheme; for fp4 the largest code."""
    args = scheme.weights
    assert args is not None
    return {
        "int": (2**args.num_bits - 1) / 2,
        "float": 448.0 if args.num_bits == 8 else 6.0,
    }[args.type]


@st.composite
def masters(
    draw: st.DrawFn, scheme: Scheme, exponents: tuple[int, int] = (-44, 36)
) -> torch.Tensor:
    """Draw a weight [O, I] that the scheme can hold: heavy tails or exact rounding ties, zeros, and
    single chosen values.
    """
    group = scheme.group_size
    rows = scheme.block[0] if scheme.block else 1
    outputs = (
        rows * draw(st.integers(1, 2))
        if scheme.block
        else draw(st.sampled_from((1, 3, 17)) | st.integers(1, 24))
    )
    if group:
        inputs = group * draw(st.integers(1, 3))
    else:
        multiple = 8 if scheme.packs_integers else 1
        inputs = multiple * draw(st.sampled_from((1, 3, 17)) | st.integers(1, 200))
    per_scale = group or inputs
    generator = seeded(draw(st.integers(0, 2**32 - 1)))
    normal = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        tail = draw(st.sampled_from((0.0, 1.0, 3.0)))
        exponents_ = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
        weight = normal * (tail * exponents_).exp()
        weight *= 10.0 ** draw(st.integers(*exponents))
    # half or quarter multiples of a power-of-two scale: every rounding is exact or a tie
    else:
        half = half_range(scheme)
        steps = 4 if scheme.name in FP4 else 2
        weight = (normal * half / 3).clamp(-half, half).mul(steps).round() / steps
        weight[:, ::per_scale] = half * draw(st.sampled_from((-1, 1)))
        weight *= 2.0 ** draw(st.integers(-20, 20))
    holes = torch.rand(outputs // rows, inputs // per_scale, generator=generator) < draw(
        st.sampled_from((0.0, 0.4))
    )
    weight[holes.repeat_interleave(rows, dim=0).repeat_interleave(per_scale, dim=1)] = 0.0
    single = torch.tensor(
        draw(st.lists(finite_floats, max_size=min(4, outputs * inputs))),
        dtype=torch.float64,
    )
    places = torch.randperm(outputs * inputs, generator=generator)[: len(single)]
    weight.view(-1)[places] = single
    # From 1.75 · 2^127 on the library's power-of-two scale is infinite, and all of its codes zero.
    master = draw(
        master_dtypes.filter(lambda dtype: dtype != torch.float16 or scheme.name not in FP4)
    )
    largest = min(
        1.5 * 2.0**127 if scheme.name == "mxfp4a16" else LARGEST,
        torch.finfo(master).max,
    )
    return weight.clamp(-largest, largest).to(master)


def per_element(low_bit: LowBitWeight, values: torch.Tensor) -> torch.Tensor:
    """Expand one value per scale to one value per element, [O, I]."""
    rows, columns = low_bit.shape
    return values.repeat_interleave(rows // values.shape[0], dim=0).repeat_interleave(
        columns // values.shape[1], dim=1
    )


def check_against_library(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> None:
    scale, _ = library_scale(weight, scheme, dtype)
    if scheme.name in FP4:
        if float(weight.abs().max()) > torch.finfo(dtype).max:
            with pytest.raises(ValueError, match="is beyond"):
                materialize(weight, scheme, dtype)
            return
    # the library stores the overflow; materialize refuses it
    elif not torch.isfinite(scale).all():
        with pytest.raises(ValueError, match="a scale beyond"):
            materialize(weight, scheme, dtype)
        return
    low_bit = materialize(weight, scheme, dtype)
    theirs = library(weight, scheme, dtype)
    ours = dict(low_bit.tensors())
    assert set(ours) == set(theirs)
    # the library divides by a scale that vanished in the cast; see the test of those groups
    kept = scale != 0
    if not kept.all():
        assert torch.equal(
            as_bytes(ours["weight_scale"][kept]), as_bytes(theirs["weight_scale"][kept])
        )
        codes = theirs["weight_packed" if scheme.packs_integers else "weight"]
        unpacked = LowBitWeight(scheme, codes, None, low_bit.shape)
        chosen = per_element(low_bit, kept)
        assert torch.equal(
            as_bytes(low_bit.unpacked()[chosen]), as_bytes(unpacked.unpacked()[chosen])
        )
        return
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        assert torch.equal(as_bytes(tensor), as_bytes(theirs[name])), name


@given(st.data())
@settings(max_examples=examples(300))
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_and_scales_are_the_librarys_bytes(name: str, data: st.DataObject):
    """Contract: materialize = `calculate_qparams` + cast to the compute dtype + the format's
    `compress`, bit for bit and by name, over awkward shapes, all master and compute dtypes,
    magnitudes from 1e-44 to 3e38, ties and zero groups. Blind spot: the library is called per
    tensor here; the publish tests check that the engine unpacks the same.
    """
    scheme = get_scheme(name)
    check_against_library(data.draw(masters(scheme)), scheme, data.draw(compute_dtypes))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
def test_views_and_large_layers_are_the_librarys_bytes(name: str, dtype: torch.dtype):
    """Contract: this also holds for a layer of ordinary size and for a parameter that requires
    gradients.
    """
    generator = seeded(7)
    weight = (
        torch.randn(384, 1024, generator=generator)
        * torch.randn(384, 1024, generator=generator).exp()
        * 0.02
    )
    check_against_library(weight, get_scheme(name), dtype)
    low_bit = materialize(torch.nn.Parameter(weight), get_scheme(name), dtype)
    assert low_bit.scale is not None
    assert not low_bit.codes.requires_grad
    assert not low_bit.scale.requires_grad


@pytest.mark.parametrize("name", [name for name in STORES_COMPUTE_SCALES if name != "fp8-block"])
@pytest.mark.parametrize("master", [MASTER_DTYPES["float32"], MASTER_DTYPES["bfloat16"]])
@pytest.mark.parametrize("magnitude", [1e-7, 3e-8, 1e-9, 1e-20])
def test_groups_whose_float16_scale_vanishes_stay_close_to_zero(
    name: str, master: torch.dtype, magnitude: float
):
    """Contract: if absmax / half-range rounds to zero in float16 (below 2^-25), the library divides
    by zero. Here the scale is 2^-23, so results are finite: codes are the master divided by that
    scale, and the dequantized weight stays within one code of the tiny master. The ordinary row
    beside it does not change. The scale of a float16 master vanishes before that cast and is
    float16's epsilon, as in the library.
    """
    scheme = get_scheme(name)
    weight = torch.randn(3, 256, generator=seeded(1)).clamp(
        -3,
        3,
    )
    weight[1] *= magnitude / 3
    weight = weight.to(master)
    low_bit = materialize(weight, scheme, torch.float16)
    vanished = library_scale(weight, scheme, torch.float16)[0] == 0
    assert vanished[1].all()
    assert not vanished[::2].any()
    assert low_bit.scale is not None
    assert (low_bit.scale[1] == 2.0**-23).all()
    dequantized = low_bit.dequantized()
    assert dequantized.isfinite().all()
    difference = (dequantized[1] - weight[1].float()).abs()
    assert difference.max() <= 2.0**-23 / 2
    check_against_library(weight[::2], scheme, torch.float16)
    tiniest = materialize(
        torch.full((2, 128), 1e-12, dtype=master),
        scheme,
        torch.float16,
    )
    assert (tiniest.dequantized().abs() < 1e-9).all()


@given(st.data())
@settings(max_examples=examples(60))
@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantized_is_code_times_scale_rounded_once(name: str, data: st.DataObject):
    """Contract: dequantized(dtype) = code · scale, exact (computed here in float64) and rounded
    once to dtype. An NVFP4 scale is a quotient of two stored numbers, which is rounded to float32
    first.
    """
    scheme = get_scheme(name)
    compute = data.draw(compute_dtypes)
    low_bit = materialize(
        data.draw(masters(scheme, exponents=(-20, 4)).filter(_ordinary)),
        scheme,
        compute,
    )
    assert low_bit.scale is not None
    scale = (
        2.0 ** (low_bit.scale.to(torch.float64) - 127)
        if name == "mxfp4a16"
        else low_bit.scale.to(torch.float64)
    )
    if low_bit.global_scale is not None:
        scale = (low_bit.scale.float() / low_bit.global_scale).to(torch.float64)
    exact = low_bit.unpacked().to(torch.float64) * per_element(low_bit, scale)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(
            low_bit.dequantized(dtype),
            exact.to(torch.float32).to(dtype),
        )
    assert low_bit.dequantized().dtype == torch.float32


def _ordinary(weight: torch.Tensor) -> bool:
    """Return whether the weight is within float16's range, so that scales and dequantized weights
    are too.
    """
    return bool(weight.abs().max().double() <= torch.finfo(torch.float16).max)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values())
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for shape in ((256, 384), (6, 256))
        for name in SCHEMES
        if SCHEME_SPECS[name].fits(shape)
    ],
)
def test_weights_and_inputs_take_the_bytes_of_the_table(
    name: str, shape: tuple[int, int], dtype: torch.dtype
):
    """Contract: tensors take the number of bytes in the documented table.

    The tests above compare their names, dtypes and shapes with the library.
    """
    scheme = get_scheme(name)
    spec = SCHEME_SPECS[name]
    weight = torch.randn(shape, generator=seeded(0))
    low_bit = materialize(weight, scheme, dtype)
    assert low_bit.shape == shape
    assert spec.weight_bytes(shape, dtype.itemsize) == sum(t.nbytes for _, t in low_bit.tensors())
    x = weight.to(dtype)
    kept = x if scheme.activations is None else quantize_activation(x, scheme).codes
    assert spec.input_bytes(dtype.itemsize) * x.numel() == kept.nbytes


PRESETS = {
    "w4a16": "W4A16",
    "w8a16": "W8A16",
    "w8a8": "W8A8",
    "w4afp8": "W4AFP8",
    "fp8": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "nvfp4a16": "NVFP4A16",
    "nvfp4": "NVFP4",
    "mxfp4a16": "MXFP4A16",
}


@pytest.mark.parametrize("name", PRESETS)
def test_schemes_are_the_librarys_presets(name: str):
    """Contract: schemes equal the library's presets. w4a8 differs from its preset by a zero point,
    and w4a16's other group sizes have none.
    """
    assert get_scheme(name).quantization == preset_name_to_scheme(PRESETS[name], targets=["Linear"])


@pytest.mark.parametrize("name", QUANTIZED)
def test_formats_are_those_the_library_infers(name: str):
    """Contract: both readers resolve the same format. w4afp8 is stored packed, as vLLM reads it,
    although the library would not pack it.
    """
    scheme = get_scheme(name)
    assert scheme.quantization is not None
    assert scheme.format is not None
    inferred = infer_module_format(torch.nn.Linear, scheme.quantization)
    assert scheme.format == inferred or (name, inferred.value) == (
        "w4afp8",
        "int-quantized",
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_is_recognized_by_its_arguments(name: str):
    """Contract: this includes the round trip through config.json, from which an engine learns the
    scheme.
    """
    from compressed_tensors.quantization import QuantizationConfig

    scheme = get_scheme(name)
    found = scheme_of_args(scheme.weights, scheme.activations)
    assert found is not None
    assert found.name == name
    written = write_quantization_config([(scheme, ["Linear"])] if scheme.quantization else [], [])
    if written is not None:
        group = QuantizationConfig.model_validate(written).config_groups["group_0"]
        found = scheme_of_args(group.weights, group.input_activations)  # pyright: ignore[reportAttributeAccessIssue]
        assert found is not None
        assert found.name == name


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(
    "bad",
    [float("nan"), float("inf"), float("-inf")],
)
@pytest.mark.parametrize("master", MASTER_DTYPES.values())
def test_non_finite_weights_are_refused(name: str, bad: float, master: torch.dtype):
    """Contract: one NaN or infinity anywhere raises, because its code would look ordinary. fp4 also
    refuses float16 masters.
    """
    weight = torch.randn(128, 256, generator=seeded(0)).to(master)
    weight[2, 200] = bad
    said = r"'a\.b': .*NaN or infinity .* resume from a checkpoint"
    if master == torch.float16 and name in FP4:
        said = r"layer 'a\.b' has a float16 master, .* learner\.master_dtype to 'bfloat16'"
    with pytest.raises(ValueError, match=said):
        materialize(weight, get_scheme(name), torch.bfloat16, "a.b")
    # under scales that are kept, nothing is divided by what is not finite
    if name in ("w4a16", "w8a8"):
        kept = materialize(weight.nan_to_num(0, 1, -1), get_scheme(name), torch.bfloat16).scale
        with pytest.raises(ValueError, match=said):
            materialize(weight, get_scheme(name), torch.bfloat16, "a.b", scale=kept)


def test_a_scale_beyond_float16_is_refused_with_the_remedy():
    weight = torch.full((1, 128), 6e5)
    with pytest.raises(
        ValueError,
        match=r"magnitude 6e\+05 .* beyond torch\.float16's range; use bfloat16",
    ):
        materialize(weight, get_scheme("w4a16"), torch.float16)
    assert torch.isfinite(
        materialize(weight, get_scheme("w4a16"), torch.bfloat16).dequantized()
    ).all()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("fp8-block", [64, 256], "has 64 output rows, no multiple of the block's 128"),
        ("fp8-block", [128, 192], "has 192 input columns, no multiple of the group size 128"),
        (
            "w4a16-channel",
            [32, 20],
            "has 20 input columns, no multiple of the 8 codes that are packed",
        ),
        ("nvfp4", [32, 40], "has 40 input columns, no multiple of the group size 16"),
        ("mxfp4a16", [32, 48], "has 48 input columns, no multiple of the group size 32"),
        ("w8a16", [32, 64], "has 64 input columns, no multiple of the group size 128"),
        ("w4a16", [2, 1], "has 1 input columns, no multiple of the group size 128"),
        ("w4a16", [2, 127], "has 127 input columns, no multiple of the group size 128"),
        ("w4a16", [2, 136], "has 136 input columns, no multiple of the group size 128"),
        ("w4a16", [2, 1000], "has 1000 input columns, no multiple of the group size 128"),
    ],
)
def test_shapes_a_scheme_cannot_hold_are_refused(name: str, shape: tuple[int, int], message: str):
    """Contract: the error names scheme, layer and both sizes, and nothing is padded silently.

    Other schemes hold any shape.
    """
    with pytest.raises(
        SchemeError, match=f"scheme '{name}': layer 'x' {re.escape(message)}"
    ) as error:
        materialize(torch.ones(shape), get_scheme(name), torch.bfloat16, "x")
    proposed = str(error.value).partition("fits it (")[2].partition(")")[0].split(", ")
    assert {"w8a8", "fp8", "bf16"} <= {*proposed}
    for other in SCHEMES:
        with nullcontext() if other in proposed else pytest.raises(SchemeError):
            materialize(torch.ones(shape), get_scheme(other), torch.bfloat16, "x")


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def expert_masters(
    experts: int, inner: int, hidden: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 masters [E, 2I, H] and [E, H, I]."""
    gate_up = heavy(experts, 2 * inner, hidden, seed=seed, rows=False) * 0.05
    return gate_up, heavy(experts, hidden, inner, seed=seed + 2, rows=False) * 0.05


@st.composite
def stacks(draw: st.DrawFn, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw masters [E, 2I, H] and [E, H, I] in fp32 or bf16, with experts of different magnitudes
    and one of zeros.
    """
    step = max(get_scheme(scheme).group_size or 8, 8)
    experts = draw(st.integers(1, 6))
    inner = step * draw(st.integers(1, 2))
    hidden = step * draw(st.integers(1, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    size = 10.0 ** torch.randint(-2, 3, (experts, 1, 1), generator=seeded(seed))
    gate_up, down = (stack * size for stack in expert_masters(experts, inner, hidden, seed))
    if draw(st.booleans()):
        gate_up[draw(st.integers(0, experts - 1))] = 0
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    return gate_up.to(dtype), down.to(dtype)


def by_library(
    gate_up: torch.Tensor, down: torch.Tensor, scheme: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Quantize by compressed-tensors, expert by expert and matrix by matrix.

    NVFP4's tensor-wide scale spans gate and up.
    """
    found = get_scheme(scheme)
    rows = gate_up.shape[1] // 2
    tensors = {}
    for e in range(len(gate_up)):
        parts = dict(
            zip(
                PROJECTIONS,
                (gate_up[e, :rows], gate_up[e, rows:], down[e]),
                strict=True,
            )
        )
        if found.quantization is None:
            tensors |= {f"{e}.{name}.weight": part.to(dtype) for name, part in parts.items()}
            continue
        both = library(gate_up[e], found, dtype)
        for name, part in parts.items():
            written = library(part, found, dtype)
            if found.fuses_scales and name != "down_proj":
                cut = slice(0, rows) if name == "gate_proj" else slice(rows, None)
                written = {k: v[cut] if v.ndim == 2 else v for k, v in both.items()}
            tensors |= {f"{e}.{name}.{suffix}": tensor for suffix, tensor in written.items()}
    return tensors


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values(), ids=COMPUTE_DTYPES)
@given(data=st.data())
@settings(max_examples=examples(8))
def test_every_experts_tensors_are_the_librarys(
    scheme: str, dtype: torch.dtype, data: st.DataObject
):
    """Contract: names, dtypes, shapes and bytes are those that compressed-tensors writes for each
    expert's matrix by itself, so one pass over a stack lets no expert's scale depend on another's
    weights. Magnitudes of experts differ by up to 10^4.
    """
    gate_up, down = data.draw(stacks(scheme))
    low_bit = materialize_experts(gate_up, down, get_scheme(scheme), dtype, "layer")
    theirs = by_library(gate_up, down, scheme, dtype)
    assert same_bits(sorted(low_bit.tensors(ExpertLayout())), sorted(theirs.items()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_views_of_one_buffer_a_stack(scheme: str):
    """Contract: the tensors that are multiplied are published without a copy.

    NVFP4, whose scale spans a matrix, has a buffer per expert.
    """
    low_bit = materialize_experts(
        *expert_masters(3, 128, 128, seed=0),
        get_scheme(scheme),
        torch.bfloat16,
        "layer",
    )
    single = not get_scheme(scheme).fuses_scales
    for part in ("gate_up", "down"):
        weights = [getattr(expert, part) for expert in low_bit.experts]
        buffers = {weight.codes.untyped_storage().data_ptr() for weight in weights}
        assert len(buffers) == (1 if single else 3)
    for expert in low_bit.experts:
        streamed = dict(expert.tensors(ExpertLayout()))
        for name, tensor in streamed.items():
            source = expert.down if name.startswith("down") else expert.gate_up
            if name.endswith((".weight", ".weight_packed")):
                assert (
                    tensor.untyped_storage().data_ptr() == source.codes.untyped_storage().data_ptr()
                )
            if name.endswith(".weight_scale"):
                assert source.scale is not None
                assert (
                    tensor.untyped_storage().data_ptr() == source.scale.untyped_storage().data_ptr()
                )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_later_version_of_experts_is_written_into_the_earlier_ones_buffers(scheme: str):
    """Contract: who holds an earlier version's tensors reads the later version in them, which has
    the bytes of one made anew.
    """
    later = expert_masters(3, 128, 128, seed=1)

    def version(masters: tuple[torch.Tensor, torch.Tensor], out: LowBitExperts | None = None):
        return materialize_experts(*masters, get_scheme(scheme), torch.bfloat16, "layer", out)

    earlier = version(expert_masters(3, 128, 128, seed=0))
    tensors = dict(earlier.tensors(ExpertLayout()))
    version(later, earlier)
    anew = dict(version(later).tensors(ExpertLayout()))
    assert same_bits(sorted(tensors.items()), sorted(anew.items()))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "bf16"])
def test_one_bad_weight_among_all_experts_is_refused(scheme: str):
    gate_up, down = expert_masters(3, 128, 128, seed=2)
    down[2, 100, 50] = float("nan")
    with pytest.raises(
        ValueError, match=r"'model\.layers\.0\.mlp\.experts': a master weight holds NaN"
    ):
        materialize_experts(
            gate_up,
            down,
            get_scheme(scheme),
            torch.bfloat16,
            "model.layers.0.mlp.experts",
        )
