"""Tests of compiled materialization: the bits of torch's operators, and what reuse of buffers must
not break.
"""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.configs.errors import PrecisionError
from qarl.quant.checkpoint.families import ExpertLayout
from qarl.quant.kernels import LowBitMatmul, make_factory
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import LowBitWeight, by_operators, materialize, materializer
from qarl.quant.materialize.cpu_dispatch import (
    Backend,
    Materializer,
    numba_missing,
    quantize_on_cpu,
)
from qarl.quant.materialize.experts import materialize_experts
from qarl.quant.materialize.weight import empty
from qarl.quant.runtime.thread_pool import in_threads
from qarl.quant.schemes import MASTER_DTYPES, SCHEMES, get_scheme
from tests.support.kernels import needs_cuda
from tests.support.profiles import examples
from tests.support.tensors import as_bytes, same_bits, seeded

FUSED = (
    "w4a16",
    "w4a16-g32",
    "w4a16-channel",
    "w8a16",
    "w8a8",
    "w4a8",
    "w4afp8",
    "fp8",
)
EAGER = ("fp8-block", "nvfp4a16", "mxfp4a16")
COMPUTE = (torch.bfloat16, torch.float16, torch.float32)
CPU = torch.device("cpu")

needs_numba = pytest.mark.skipif(
    numba_missing() is not None, reason="numba cannot be imported here"
)
schemes = pytest.mark.parametrize("name", FUSED)
masters = pytest.mark.parametrize(
    "master", [MASTER_DTYPES["float32"], MASTER_DTYPES["bfloat16"]], ids=str
)
computes = pytest.mark.parametrize("dtype", COMPUTE, ids=str)


def check(weight: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Assert that the compiled loop gives the operators' bits, or that both refuse the weight."""
    scheme = get_scheme(name)
    buffers = empty(scheme, (weight.shape[0], weight.shape[1]), dtype)
    try:
        expected = by_operators(weight, scheme, dtype, "layer")
    except PrecisionError as error:
        with pytest.raises(PrecisionError, match=re.escape(str(error))):
            quantize_on_cpu(weight, buffers, dtype, "layer")
        return
    quantize_on_cpu(weight, buffers, dtype, "layer")
    assert same_bits(buffers.tensors(), expected.tensors())


def random_bits(
    rows: int, columns: int, master: torch.dtype, seed: int, finite: bool = True
) -> torch.Tensor:
    """Draw uniform bits: every exponent and sign, subnormals, and unless `finite` infinities and
    NaN.
    """
    bits = torch.randint(
        0,
        256,
        (rows, columns * master.itemsize),
        generator=seeded(seed),
    )
    weight = bits.to(torch.uint8).view(master)
    return torch.where(weight.isfinite(), weight, 1.0).to(master) if finite else weight


@needs_numba
@schemes
@masters
@computes
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 5),
    columns=st.integers(1, 70),
    exponent=st.integers(-46, 38),
    tail=st.sampled_from((0.0, 1.0, 4.0)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(60))
def test_compiled_loops_give_the_operators_bits(
    name: str,
    master: torch.dtype,
    dtype: torch.dtype,
    rows: int,
    groups: int,
    columns: int,
    exponent: int,
    tail: float,
    seed: int,
):
    """Contract: codes and scales are those of torch's operators, bit for bit, over 2,880 layers
    with heavy tails, every magnitude of float32, odd widths and groups of zeros. The loop refuses
    whatever the operators refuse. Blind spot: both could be wrong alike;
    tests/quant/test_materialize.py compares `materialize` with compressed-tensors.
    """
    scheme = get_scheme(name)
    width = (scheme.group_size or columns * (8 if scheme.packs_integers else 1)) * (
        groups if scheme.group_size else 1
    )
    generator = seeded(seed)
    normal, spread = (
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    weight = normal * (tail * spread).exp() * 10.0**exponent
    weight[rows // 2, : width // groups] = 0.0
    check(weight.clamp(-3.3e38, 3.3e38).to(master), name, dtype)


@needs_numba
@schemes
@masters
@computes
def test_arbitrary_bits_give_the_operators_bits(name: str, master: torch.dtype, dtype: torch.dtype):
    """Contract: this holds for 1,000 layers per scheme, spread over the dtypes, of uniformly random
    bits, and of bits scaled so that most scales are ordinary.
    """
    columns = get_scheme(name).group_size or 64
    for seed in range(84):
        weight = random_bits(3, 2 * columns, master, seed)
        check(weight, name, dtype)
        check((weight.double() % 2.0).to(master), name, dtype)


@needs_numba
@schemes
@computes
def test_every_bfloat16_value_gives_the_operators_bits(name: str, dtype: torch.dtype):
    """Contract: this holds for all 65,280 finite values, each in a group with an absmax of 1
    (values above 1: in a group of their own).
    """
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[values.isfinite()]
    width = get_scheme(name).group_size or 128
    small = values[values.abs() <= 1].view(-1)
    small = torch.cat(
        (
            small,
            torch.ones(-len(small) % (width - 1), dtype=torch.bfloat16),
        )
    ).view(-1, width - 1)
    weight = torch.cat(
        (small, torch.ones(len(small), 1, dtype=torch.bfloat16)),
        dim=1,
    )
    check(weight, name, dtype)
    check(weight.float(), name, dtype)
    # the stored scale is 1: the codes are the values, rounded
    for scale in (448.0, 7.5, 127.5):
        check(weight * scale, name, dtype)
        check(weight.float() * scale, name, dtype)
    large = values[values.abs() > 1]
    check(
        large[: len(large) // width * width].view(-1, width),
        name,
        dtype,
    )


@needs_numba
def test_float32_rounds_to_e4m3_as_torch_does():
    """Contract: codes are torch's own conversion.

    A row whose absmax is 448 has scale 1; it holds every midpoint between two e4m3 values, its
    float32 neighbours, subnormals and both zeros.
    """
    e4m3 = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (e4m3[1:] + e4m3[:-1]) / 2
    near = [
        torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)
    ]
    extra = torch.tensor([0.0, 2.0**-10, 1e-40, 1e-20, 2.0**-149, 448.0, 447.9])
    values = torch.cat((e4m3, middle, *near, extra))
    weight = torch.cat((values, -values)).view(1, -1)
    made = materialize(weight, get_scheme("fp8"), torch.float32)
    assert made.scale is not None
    assert made.scale.item() == 1.0
    assert torch.equal(as_bytes(made.codes), as_bytes(weight.to(torch.float8_e4m3fn)))


@needs_numba
@schemes
def test_threads_and_strides_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    """Contract: rows cut over 1, 2 or 3 threads and masters that are transposed or sliced views
    give the same bits.
    """
    weight = torch.randn(1030, 512, generator=seeded(0))
    expected = list(by_operators(weight, get_scheme(name), torch.bfloat16, "layer").tensors())
    for count in (1, 2, 3):
        # vLLM ignores set_num_threads
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert same_bits(materialize(weight, get_scheme(name), torch.bfloat16).tensors(), expected)
    for view in (
        weight.t().contiguous().t(),
        torch.cat((weight, weight), dim=1)[:, :512],
    ):
        assert not view.is_contiguous()
        assert same_bits(materialize(view, get_scheme(name), torch.bfloat16).tensors(), expected)


@pytest.mark.parametrize("name", SCHEMES)
@masters
def test_materialization_into_a_buffer_keeps_its_addresses(name: str, master: torch.dtype):
    """Contract: with `out`, the result is `out` at its addresses, with the bits of a fresh result,
    for every scheme and tensor.
    """
    scheme = get_scheme(name)
    generator = seeded(0)
    first = (torch.randn(128, 384, generator=generator) * 1.0).to(master)
    second = (torch.randn(128, 384, generator=generator) * 0.1).to(master)
    made = materialize(first, scheme, torch.bfloat16)
    old = LowBitWeight(scheme, made.codes.clone(), None, made.shape)
    addresses = addresses_of(made)
    again = materialize(second, scheme, torch.bfloat16, out=made)
    assert again is made
    assert addresses == addresses_of(made)
    assert same_bits(made.tensors(), materialize(second, scheme, torch.bfloat16).tensors())
    assert not torch.equal(as_bytes(old.codes), as_bytes(made.codes))


def addresses_of(weight: LowBitWeight) -> list[int]:
    tensors = (weight.codes, weight.scale, weight.global_scale)
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("name", ["bf16", "w4a16-g32", "fp8", "nvfp4a16", "mxfp4a16"])
def test_materialization_of_experts_into_buffers_keeps_their_addresses(name: str):
    """Contract: this also holds for a layer's experts, whose tensors are views of two stacks
    (NVFP4: separate tensors).
    """
    generator = seeded(0)

    def stacks(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = ((3, 128, 64), (3, 64, 64))
        up, down = (torch.randn(shape, generator=generator) * scale for shape in shapes)
        return up, down

    layout = ExpertLayout()
    scheme = get_scheme(name)
    second = stacks(0.1)
    made = materialize_experts(*stacks(1.0), scheme, torch.bfloat16, "experts")
    held = [(key, t, t.clone()) for key, t in made.tensors(layout)]
    again = materialize_experts(*second, scheme, torch.bfloat16, "experts", made)
    fresh = materialize_experts(*second, scheme, torch.bfloat16, "experts")
    assert same_bits(again.tensors(layout), fresh.tensors(layout))
    for (key, now, before), (_, tensor) in zip(
        held,
        again.tensors(layout),
        strict=True,
    ):
        if not key.endswith("weight_shape"):
            assert now.data_ptr() == tensor.data_ptr()
            assert not torch.equal(as_bytes(now), as_bytes(before))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "plain"])
def test_kernels_are_built_at_the_first_forward_of_a_version(aligned: bool):
    """Contract: refresh() makes no second copy for an aligned layer.

    The first forward does, once, from the version that refresh() made, even if the masters have
    changed since. A kernel that was released is built again from the same version.
    """
    built: list[str] = []
    reference = make_factory("reference", torch.bfloat16)

    def counting(layer: str, *arguments: Any) -> LowBitMatmul:
        built.append(layer)
        return reference.linear(layer, *arguments)

    parameter = torch.nn.Parameter(torch.randn(32, 128))
    bias = torch.nn.Parameter(torch.randn(32))
    context = LayerContext(torch.bfloat16, "reference", aligned)
    context.multiply_with(SimpleNamespace(linear=counting))  # type: ignore[arg-type]
    linear = LowBitLinear("up", parameter, bias, get_scheme("w4a16"), context)
    x = torch.randn(2, 128).bfloat16()
    linear.refresh()
    assert built == []
    expected = linear(x).detach()
    linear.refresh()
    with torch.no_grad():
        parameter.add_(1.0)
        bias.add_(1.0)
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(x), expected)
    linear.release_kernel()
    assert torch.equal(linear(x), expected)
    assert built == (["up"] * 3 if aligned else [])


def test_the_materializer_is_named():
    """Contract: every scheme names its materializer, and a missing numba is
    reported as the reason.
    """
    assert materializer(get_scheme("bf16"), torch.float32, CPU) == Materializer(Backend.CAST)
    for name in EAGER:
        assert materializer(get_scheme(name), torch.bfloat16, CPU) == Materializer(Backend.TORCH)
    assert (
        str(materializer(get_scheme("w4a16"), torch.float16, CPU))
        == "torch (the compiled loops take float32 and bfloat16 masters, not float16)"
    )
    if numba_missing() is None:
        assert {materializer(get_scheme(name), torch.bfloat16, CPU) for name in FUSED} == {
            Materializer(Backend.NUMBA)
        }


@pytest.mark.slow
def test_without_numba_operators_make_the_same_bits_and_the_reason_is_reported():
    """Contract: a process that cannot import numba makes the same bits, and `materializer` reports
    why this is slower.
    """
    code = (
        "import sys; sys.modules['numba'] = None\nimport torch\nfrom qarl.quant.materialize import"
        " materialize, materializer\nfrom qarl.quant.schemes import get_scheme\nweight ="
        " torch.linspace(-1, 1, 4096).sin().view(16, 256)\nmade = materialize(weight,"
        " get_scheme('w4a16'), torch.bfloat16)\nprint(made.codes.sum().item(),"
        " materializer(get_scheme('w4a16'), weight.dtype, weight.device))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    weight = torch.linspace(-1, 1, 4096).sin().view(16, 256)
    total = materialize(weight, get_scheme("w4a16"), torch.bfloat16).codes.sum().item()
    assert out.startswith(f"{total} torch (numba cannot be imported: ")


def test_thread_ranges_cover_all_items_once_in_order(monkeypatch: pytest.MonkeyPatch):
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for items in (1, 2, 7, 100):
            ranges = in_threads(lambda start, stop: (start, stop), items, at_least=3)
            assert [i for start, stop in ranges for i in range(start, stop)] == list(range(items))
            assert len(ranges) == (1 if count == 1 else max(1, min(4 * count, items // 3)))


def test_an_error_in_a_thread_is_raised():
    def fail(start: int, stop: int) -> None:
        raise ValueError(f"{start} to {stop}")

    with pytest.raises(ValueError, match="0 to"):
        in_threads(fail, 100, at_least=1)


@pytest.mark.gpu
@needs_cuda("torch.compile's Triton code")
@schemes
@masters
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_operators_give_the_operators_bits_on_cuda(
    name: str, master: torch.dtype, dtype: torch.dtype
):
    """Contract: on CUDA, torch.compile's codes and scales are those of the eager operators there
    and those of a CPU.
    """
    scheme = get_scheme(name)
    for seed in range(20):
        generator = seeded(seed)
        weight = (torch.randn(64, 512, generator=generator) * 10.0 ** (seed - 12)).to(master)
        weight[3] = 0.0
        there = weight.cuda()
        assert materializer(scheme, master, there.device).backend is Backend.COMPILED
        made = (
            (name, tensor.cpu()) for name, tensor in materialize(there, scheme, dtype).tensors()
        )
        assert same_bits(made, materialize(weight, scheme, dtype).tensors())
