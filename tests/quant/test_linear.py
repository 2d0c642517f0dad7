"""Tests of one low-bit linear layer: its product, its straight-through gradients, and what it keeps
for the backward.
"""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from qarl.quant.kernels.vllm_cpu import register
from qarl.quant.kernels.vllm_cpu.unquantized import ROWS, in_pairs, make_rows_independent
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.materialize import materialize
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES, get_scheme
from qarl.rollout.vllm.worker import _prepare_heads
from tests.support.kernels import VLLM_CPU_KERNELS, no_cuda, products
from tests.support.layers import (
    collected,
    dequantized_activation,
    kept_tensors,
    layer_gradients,
    make_linear,
    unpacked,
)
from tests.support.profiles import examples
from tests.support.tensors import heavy, normal, relative_error, seeded

BOUND = {"vllm": 1.0, "reference": 1.5}
"""Relative Frobenius error allowed against the float64 product, in units of the compute dtype's
epsilon: half a unit per rounding. The output is always rounded once. vLLM's int4 kernel also rounds
the dequantized weight, the reference both operands.
"""

schemes = pytest.mark.parametrize("scheme", list(SCHEMES))
dtypes = pytest.mark.parametrize("dtype", COMPUTE_DTYPES.values(), ids=COMPUTE_DTYPES)
every_product = products(vllm=VLLM_CPU_KERNELS, reference=SCHEMES)


def summation_error(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the error (Frobenius norm) that fp32 sums of I products may have: √I half units of
    fp32 of Σ|x||w|, the growth of independent rounding errors (Higham and Mary, SIAM J. Sci.
    Comput. 41, 2019). It is visible in float32 only, where the output is no coarser than the sums.
    x [N, I] and weight [O, I] are as multiplied.
    """
    half_unit = torch.finfo(torch.float32).eps / 2
    magnitudes = x.double().abs() @ weight.double().abs().t()
    return x.shape[1] ** 0.5 * half_unit * float(magnitudes.norm())


@every_product
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@given(
    tokens=st.integers(1, 40),
    rows=st.sampled_from([32, 64, 96]),
    columns=st.sampled_from([128, 384, 256]),
    seed=st.integers(0, 2**20),
)
@example(tokens=9, rows=48, columns=128, seed=0)
@example(tokens=9, rows=80, columns=128, seed=0)
@settings(max_examples=examples(15))
def test_forward_is_the_kernels_product_of_the_published_codes(
    kernel: str,
    scheme: str,
    dtype: torch.dtype,
    bias: bool,
    tokens: int,
    rows: int,
    columns: int,
    seed: int,
):
    """Contract: ‖y - ŷ‖ ≤ BOUND · eps · ‖ŷ‖ plus the error of fp32 sums, with ŷ = x̂ · Ŵᵀ + b in
    float64 from published codes and scales.

    A kernel that read other weights, scales or unquantized activations would be further away. To
    show this, the product of the masters is checked to be more than two bounds off if codes are
    coarse relative to the dtype (int4, or a dtype other than bfloat16). For w8a8 this includes rows
    that vLLM's own kernel for CPUs with AMX does not take, and float16, for which `vllm_cpu.int8`
    is the substitute.
    """
    rows = 128 if scheme == "fp8-block" or (rows % 32 and scheme != "w8a8") else rows
    linear = make_linear(scheme, kernel, dtype, (rows, columns), bias, seed)
    x = heavy(tokens, columns, seed=seed + 20).to(dtype)
    used = dequantized_activation(x, linear)
    weight = unpacked(linear.codes())
    exact = used @ weight.t()
    summed = summation_error(used, weight)
    # before a bias outweighs the product
    off = relative_error(
        x.double() @ linear.master.detach().double().t(),
        exact,
    )
    if linear.bias is not None:
        exact = exact + linear.bias.detach().to(dtype).double()
    with torch.no_grad():
        y = linear(x)
    assert y.dtype == dtype
    assert y.shape == exact.shape
    # whose operator's scales are that
    coarsest = torch.bfloat16 if scheme == "w4a8" and kernel == "vllm" else dtype
    bound = BOUND[kernel] * torch.finfo(coarsest).eps + summed / float(exact.norm())
    assert relative_error(y, exact) <= bound
    args = get_scheme(scheme).weights
    if args is not None and (args.num_bits == 4 or dtype != torch.bfloat16):
        assert off > 2 * bound


@no_cuda
@pytest.mark.parametrize(
    ("scheme", "kernel"), [("w4a16", "mp"), ("w4a16-channel", "mp"), ("w8a8", "int8")]
)
@dtypes
def test_cpus_without_avx512_multiply_in_fp32(
    scheme: str, kernel: str, dtype: torch.dtype, monkeypatch
):
    """Contract: these CPUs' kernels, wherever this runs, are within rounding of the exact product,
    for columns whose int8 products together exceed fp32's integers. A row's result does not depend
    on its neighbours. oneDNN copies parts of rows; without copies 512 rows by 768 × 2304 take 41 s.
    """
    from vllm.model_executor.kernels import linear as tables
    from vllm.platforms.interface import PlatformEnum

    from qarl.quant.kernels.vllm_cpu.int4 import CPUWNA16Fp32LinearKernel
    from qarl.quant.kernels.vllm_cpu.int8 import CPUInt8ScaledMMFp32Kernel
    from qarl.quant.kernels.vllm_gpu import load_plugins

    def product(part: torch.Tensor, codes: torch.Tensor, *more: Any) -> torch.Tensor:
        assert part.is_contiguous()
        assert codes.is_contiguous()
        return one_dnn(part, codes, *more)

    one_dnn = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", product)
    load_plugins()  # into the tables as they are
    table, own = {
        "mp": (tables._POSSIBLE_KERNELS, CPUWNA16Fp32LinearKernel),
        "int8": (tables._POSSIBLE_INT8_KERNELS, CPUInt8ScaledMMFp32Kernel),
    }[kernel]
    monkeypatch.setitem(table, PlatformEnum.CPU, [own])
    linear = make_linear(scheme, "vllm", dtype, (64, 2176), bias=False)
    x = heavy(9, 2176, seed=3).to(dtype)
    used = dequantized_activation(x, linear)
    weight = unpacked(linear.codes())
    exact = used @ weight.t()
    with torch.no_grad():
        y = linear(x)
        assert linear.kernel.name == own.__name__
        assert torch.equal(linear(x[4:5]), y[4:5])
    assert relative_error(y, exact) <= torch.finfo(dtype).eps + summation_error(
        used, weight
    ) / float(exact.norm())


@no_cuda
def test_fp8_products_in_fp32_are_those_of_e4m3():
    """Contract: `quant.kernels.vllm_cpu.fp8` multiplies the same values as the product that it
    replaces, with sums in another order. That order does not depend on the number of tokens,
    because the last token is decoded by itself and scored together with others.
    """
    from qarl.quant.kernels.vllm_cpu.fp8 import decoded, fp32_product

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(
        decoded(every),
        every.float(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )
    x = heavy(3, 64, seed=3).to(torch.float8_e4m3fn)
    weight = heavy(32, 64, seed=32).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    theirs = product(
        x,
        weight.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=torch.float32,
    )
    ours = decoded(x) @ decoded(weight).t()
    torch.testing.assert_close(
        ours,
        theirs,
        rtol=1e-6,
        atol=1e-6 * float(theirs.abs().max()),
    )
    assert torch.equal(decoded(weight.t()), decoded(weight).t()), "not contiguous"
    tokens = heavy(144, 1024, seed=1)
    weight = heavy(1024, 1024, seed=2)
    threads = torch.get_num_threads()
    try:
        for torch_has, count in itertools.product(
            (1, 2),
            (1, 3, 5, 13, 64),
        ):
            torch.set_num_threads(torch_has)
            apart = torch.cat([fp32_product(part, weight) for part in tokens.split(count)])
            assert torch.equal(apart, fp32_product(tokens, weight)), count
    finally:
        torch.set_num_threads(threads)


@no_cuda
@pytest.mark.parametrize(
    "shape",
    [(16, 8), (48, 64), (528, 72)],
    ids=str,
)
def test_int4_weights_are_packed_as_vllm_packs_them(shape: tuple[int, int]):
    """Contract: packing equals vLLM's byte for byte, for every bit pattern and for more rows than
    one block has.
    """
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    from qarl.quant.kernels.vllm_cpu.int4 import repacked

    rows, columns = shape
    generator = seeded(rows)
    words = torch.randint(
        -(2**31),
        2**31,
        (rows, columns // 8),
        generator=generator,
    )
    words = words.to(torch.int32)
    wide = quant_utils.unpack_quantized_values_into_int32(words.t(), scalar_types.uint4b8, 0)
    theirs = quant_utils.pack_quantized_values_into_int32(wide, scalar_types.uint4b8, 1)
    blocks_of_rows = theirs.view(columns, -1, 2).permute(1, 0, 2)
    assert torch.equal(repacked(words), blocks_of_rows.reshape(-1, columns * 2))


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (3, 17),
        (17, 200),
        (5, 1000),
    ],
)
@dtypes
def test_odd_shapes_multiply_too(scheme: str, shape: tuple[int, int], dtype: torch.dtype):
    """Contract: with the reference arithmetic, per-row schemes take any shape and keep the leading
    axes of x. The error is bounded elementwise against Σ|x̂||Ŵ|, since one short row may cancel.
    """
    linear = make_linear(scheme, "reference", dtype, shape, bias=False)
    x = heavy(6, shape[1], seed=3).to(dtype)
    y = linear(x.view(2, 3, -1))
    assert y.shape == (2, 3, shape[0])
    x_used = dequantized_activation(x, linear)
    weight = unpacked(linear.codes())
    exact = x_used @ weight.t()
    magnitudes = x_used.abs() @ weight.abs().t()
    error = (y.view(6, -1).double() - exact).abs()
    assert (error <= 2 * torch.finfo(dtype).eps * magnitudes).all()


def fake_quant_gradients(
    linear: LowBitLinear, x: torch.Tensor, dy: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of the textbook straight-through estimator, v + (dq(v) - v).detach() on
    both operands, by autograd in float32.
    """
    x_used = dequantized_activation(x, linear).float() if linear.context.aligned else x.float()
    cast = linear.master.detach().to(linear.context.dtype)
    w_used = unpacked(linear.codes()).float() if linear.context.aligned else cast.float()
    x = x.detach().float().requires_grad_()
    weight = linear.master.detach().float().requires_grad_()
    bias = None if linear.bias is None else linear.bias.detach().float().requires_grad_()
    y = F.linear(
        x + (x_used - x).detach(),
        weight + (w_used - weight).detach(),
        bias,
    )
    y.backward(dy.float())
    return collected(x, weight, bias)


@schemes
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "plain"])
@given(
    tokens=st.integers(1, 24),
    shape=st.sampled_from(
        [
            (1, 128),
            (17, 256),
            (48, 384),
        ]
    ),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=examples(15))
def test_gradients_are_those_of_straight_through_fake_quantization(
    scheme: str,
    bias: bool,
    aligned: bool,
    tokens: int,
    shape: tuple[int, int],
    seed: int,
):
    """Contract: dx = dy · Ŵ, dW = dyᵀ · x̂, db = Σ dy.

    Derivation: autograd through the detach trick in float32. The layer computes in float32 as well,
    so only the order of sums differs (tolerance 1e-5 of the largest). Blind spot: the codes are
    those of quant.*; tests of materialization and activations compare those with the libraries.
    """
    shape = (128, shape[1]) if scheme == "fp8-block" else shape
    linear = make_linear(scheme, "reference", torch.float32, shape, bias, seed, aligned=aligned)
    x = heavy(tokens, shape[1], seed=seed + 3)
    dy = heavy(tokens, shape[0], seed=seed + 6)
    ours = layer_gradients(linear, x, dy)
    theirs = fake_quant_gradients(linear, x, dy)
    for given_, expected in zip(ours, theirs, strict=True):
        assert given_.dtype == torch.float32
        torch.testing.assert_close(
            given_, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
        )


@every_product
@pytest.mark.parametrize("master_dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_a_low_compute_dtype_are_rounded_once(
    scheme: str, kernel: str, dtype: torch.dtype, master_dtype: torch.dtype
):
    """Contract: whichever kernel multiplied, dx is the float32 gradient rounded to the compute
    dtype, and dW and db are rounded to the master's. They are equal up to one unit in the last
    place, because another order of sums may round differently.
    """
    linear = make_linear(scheme, kernel, dtype, (128, 256), master_dtype=master_dtype)
    x = heavy(13, 256, seed=3).to(dtype)
    dy = normal(13, 128, seed=6).to(dtype)
    ours = layer_gradients(linear, x, dy)
    theirs = fake_quant_gradients(linear, x, dy)
    for given_, expected, kept in zip(
        ours, theirs, (dtype, master_dtype, master_dtype), strict=True
    ):
        assert given_.dtype == kept
        rtol = 1e-5 if kept == torch.float32 else torch.finfo(kept).eps
        torch.testing.assert_close(
            given_.float(), expected, rtol=rtol, atol=1e-5 * float(expected.abs().max())
        )


KEPT = {
    "w8a8": [["int8", 256], ["float32", 1]],
    "w4a8": [["int8", 256], ["float32", 1], ["float32", 1]],
    "w4afp8": [["float8_e4m3fn", 256], ["float32", 1]],
    "fp8": [["float8_e4m3fn", 256], ["float32", 1]],
    "fp8-block": [["float8_e4m3fn", 256], ["float32", 2]],
    "nvfp4": [["uint8", 128], ["float8_e4m3fn", 16]],
}
"""Scheme → dtype and count, per token of 256 columns, of every tensor kept for the backward."""


@every_product
def test_the_activation_kept_for_backward_is_low_bit(scheme: str, kernel: str, dtype: torch.dtype):
    """Contract: between forward and backward the layer keeps N·I codes of at most a byte and their
    scales, and no other tensor; an 8-bit forward must not cost a 16-bit activation. Weight-only and
    unquantized layers keep N·I values of the compute dtype, which shows that the hook works.
    """
    linear = make_linear(scheme, kernel, dtype)
    x = normal(24, 256, seed=2).to(dtype).requires_grad_()
    with kept_tensors() as saved:
        y = linear(x)
    y.float().sum().backward()
    assert x.grad is not None
    expected = KEPT.get(scheme, [(str(dtype).removeprefix("torch."), 256)])
    assert [(t.dtype, t.numel()) for t in saved] == [
        (getattr(torch, kind), 24 * count) for kind, count in expected
    ]


@every_product
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "plain"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=str)
def test_a_changed_master_takes_effect_at_refresh(
    kernel: str, scheme: str, dtype: torch.dtype, master: torch.dtype, aligned: bool
):
    """Contract: the forward multiplies the materialized version.

    An optimizer step by itself changes no output bit, neither through the weight nor through the
    bias. After refresh() the output equals that of a layer built from the new master. This includes
    masters of the compute dtype, where no rounding separates the two.
    """
    linear, fresh = (
        make_linear(scheme, kernel, dtype, seed=s, master_dtype=master, aligned=aligned)
        for s in (0, 5)
    )
    x = normal(7, 256, seed=1).to(dtype)
    assert linear.bias is not None
    assert fresh.bias is not None
    before = linear(x)
    with torch.no_grad():
        linear.master.copy_(fresh.master)
        linear.bias.copy_(fresh.bias)
    assert torch.equal(linear(x), before)
    linear.refresh()
    assert not torch.equal(linear(x), before)
    assert torch.equal(linear(x), fresh(x))


@schemes
@dtypes
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_an_unaligned_layer_is_plain_linear_algebra(scheme: str, dtype: torch.dtype, bias: bool):
    """Contract: y = F.linear(x, master in the compute dtype), bit for bit, and `weight_used`
    returns that weight. Codes are made all the same.
    """
    linear = make_linear(scheme, dtype=dtype, bias=bias, aligned=False)
    x = heavy(9, 256, seed=4).to(dtype)
    cast = linear.master.detach().to(dtype)
    assert torch.equal(
        linear(x),
        F.linear(x, cast, None if linear.bias is None else linear.bias.detach().to(dtype)),
    )
    assert torch.equal(linear.weight_used(), cast.float())
    low_bit = materialize(linear.master, get_scheme(scheme), dtype)
    assert linear.low_bit is not None
    assert torch.equal(linear.low_bit.dequantized(), low_bit.dequantized())


def test_a_layer_never_materialized_raises_with_its_name():
    master = nn.Parameter(torch.ones(32, 128))
    context = LayerContext(torch.bfloat16, "reference")
    linear = LowBitLinear("model.layers.9.k_proj", master, None, get_scheme("fp8"), context)
    with pytest.raises(
        RuntimeError,
        match=r"'model\.layers\.9\.k_proj' was never materialized.*refresh",
    ):
        linear(torch.ones(2, 128, dtype=torch.bfloat16))


@no_cuda
def test_unquantized_products_in_blocks_do_not_depend_on_other_rows(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: in vLLM's own dispatch for CPUs with AMX, every product has the same number of
    rows, so each row is computed as in a block by itself. Other dtypes do this if pairs of rows do
    not suffice, as here. An operand that is no matrix is left alone.
    """
    from vllm.model_executor.layers import utils

    calls: list[int] = []

    def counted(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        calls.append(len(x))
        # a kernel that rounds by the number of rows
        return F.linear(x, weight, bias) + len(x)

    monkeypatch.setattr(
        utils,
        "dispatch_cpu_unquantized_gemm",
        lambda layer, _: setattr(layer, "cpu_linear", counted),
    )
    make_rows_independent(amx=True)
    once = utils.dispatch_cpu_unquantized_gemm
    make_rows_independent(amx=False)
    assert utils.dispatch_cpu_unquantized_gemm is once
    layer = nn.Linear(16, 24, dtype=torch.bfloat16)
    x = normal(150, 16, seed=0).bfloat16()
    bias = normal(24, seed=1).bfloat16()
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    expected = F.linear(x, layer.weight, bias) + ROWS
    for shape in (
        (150,),
        (1,),
        (64,),
        (65,),
        (2, 5),
        (0,),
        (3, 0),
    ):
        rows = math.prod(shape)
        result = layer.cpu_linear(x[:rows].unflatten(0, shape), layer.weight, bias)  # type: ignore[operator]
        assert torch.equal(result, expected[:rows].unflatten(0, shape))
        assert {*calls} <= {ROWS, 0} and sum(calls) == -(-rows // ROWS) * ROWS, "blocks"
        calls.clear()
    for other in (
        nn.Conv1d(4, 4, 1, dtype=torch.bfloat16),
        nn.Linear(1, 1, device="meta"),
    ):
        utils.dispatch_cpu_unquantized_gemm(other, True)
        assert other.cpu_linear is counted
    wide = nn.Linear(16, 24)
    utils.dispatch_cpu_unquantized_gemm(wide, True)
    alone = wide.cpu_linear(x[:1].float(), wide.weight, wide.bias)  # type: ignore[operator]
    torch.testing.assert_close(
        alone,
        F.linear(x[:1].float(), wide.weight, wide.bias) + ROWS,
    )
    for shape in (
        (1,),
        (1, 1),
        (2,),
        (5,),
        (0,),
    ):
        rows = math.prod(shape)
        result = in_pairs(counted)(
            x[:rows].unflatten(0, shape),
            layer.weight,
            bias,
        )
        computed = 2 if rows == 1 else len(result)
        assert torch.equal(
            result,
            (F.linear(x[:rows], layer.weight, bias) + computed).unflatten(0, shape),
        )
    head: Any = object.__new__(ParallelLMHead)
    nn.Module.__init__(head)
    vars(head).update(cpu_linear=None, weight=layer.weight)
    # as after a publish, in a process that had the worker's module before the plugin
    _prepare_heads(head)
    assert torch.equal(
        head.cpu_linear(x[:1], layer.weight, bias),
        expected[:1],
    )


@no_cuda
def test_an_unquantized_row_has_the_same_bits_alone_and_among_others():
    """Contract: vLLM's own products, as its plugin leaves them, give a single row the bits that it
    has among others. If the CPU has no bfloat16 units, otherwise one value in 20,000 would differ,
    and with it one token in hundreds.
    """
    from vllm.model_executor.layers import utils

    register()
    layer = nn.Linear(256, 1024, bias=False).bfloat16()
    x = normal(128, 256, seed=0).bfloat16()
    utils.dispatch_cpu_unquantized_gemm(layer, False)
    multiply: Any = layer.cpu_linear
    together = multiply(x, layer.weight, None)
    alone = torch.cat([multiply(row, layer.weight, None) for row in x.split(1)])
    assert torch.equal(together, alone)
