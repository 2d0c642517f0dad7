"""Tests of the products of the straight-through backward: bounds on their rounding, and gradients
that are accumulated in place. Passes that work on blocks of rows visit every row once and give the
bits of all rows at once.

Axes: N tokens, O output rows, I input columns.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner import gradients
from qarl.learner.gradients import compiles, configure_backward, rounds_weights
from qarl.learner.logprobs import _Normalized, token_logprobs
from qarl.quant.layers import straight_through as backward
from qarl.quant.layers.gradients import Gradients
from qarl.quant.layers.straight_through import (
    add_weight_gradient,
    input_gradient,
    multiplies_natively,
)
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.runtime import cpu_blocks as blocks
from qarl.quant.runtime.cpu_blocks import row_blocks
from qarl.quant.schemes import get_scheme
from tests.support.kernels import needs_cuda
from tests.support.layers import layer_gradients, make_linear
from tests.support.learners import (
    drift,
    experts_policy,
    logprob_gradients,
    policy,
    random_batch,
)
from tests.support.models import collected_gradients
from tests.support.tensors import as_bytes, heavy, normal, pairwise_equal

BFLOAT16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_rounded_weight_moves_dx_by_its_own_rounding_alone(dtype: torch.dtype, tokens: int):
    """Contract, element by element, with u = eps/2 the unit roundoff of the compute dtype and γ = O
    · 2⁻²⁴ that of fp32 sums:

    exact: |dx - dy·Ŵ| ≤ u |dx| + γ Σ|dy||Ŵ| (the sum is rounded once)

    compute: |dx - dy·Ŵ| ≤ u |dx| + (u + γ) Σ|dy||Ŵ| (and every Ŵ once)

    Some element must need the second bound; otherwise a missing rounding would satisfy the first
    for both. Subnormals of float16 add their spacing, 2⁻²⁴.
    """
    weight = heavy(96, 64, seed=1)
    dy = normal(tokens, 96, seed=2).to(dtype)
    exact = dy.double() @ weight.double()
    sums = dy.double().abs() @ weight.double().abs()
    unit = torch.finfo(dtype).eps / 2
    fp32 = 96 * 2.0**-24
    for operand, allowed in (
        (weight, fp32),
        (weight.to(dtype), unit + fp32),
    ):
        dx = input_gradient([(dy, operand)])
        assert dx.dtype == dtype
        error = (dx.double() - exact).abs()
        rounded_once = unit * dx.double().abs() + 2.0**-24
        assert (error <= rounded_once + allowed * sums).all()
    assert not (error <= rounded_once + fp32 * sums).all()


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "w8a8", "fp8"])
def test_rounded_input_gradients_change_only_dx(scheme: str):
    """Contract: dW and db keep the same bits. dx differs if the dtype cannot represent code ·
    scale, within fp32's order of sums.
    """
    linear = make_linear(scheme)
    x = heavy(13, 256, seed=3).to(BFLOAT16)
    dy = normal(13, 128, seed=6).to(BFLOAT16)
    exact = layer_gradients(linear, x, dy)
    linear.zero_grad()
    linear.context.gradients.fp32_input_grad = False
    rounded = layer_gradients(linear, x, dy)
    assert pairwise_equal(exact[1:], rounded[1:])
    unit = torch.finfo(BFLOAT16).eps / 2
    sums = dy.float().abs() @ linear.weight_used().abs()
    error = (rounded[0].float() - exact[0].float()).abs()
    rounded_twice = 2 * unit * exact[0].float().abs()
    assert (error <= rounded_twice + 1.01 * unit * sums).all()
    if scheme == "bf16":
        assert (error <= rounded_twice + 128 * 2.0**-24 * sums).all()
    else:
        assert error.any()


def test_auto_rounds_weights_if_the_device_multiplies_the_dtype():
    """Contract: `auto` does not round float16, which has no fast product on CPUs, nor fp32, which
    has nothing to round to. An explicit choice is obeyed, or refused by experts.
    """
    assert not multiplies_natively(torch.float16, CPU)
    assert multiplies_natively(torch.float16, torch.device("cuda"))
    assert multiplies_natively(torch.float32, CPU)
    for dtype in (torch.float16, BFLOAT16):
        model = policy(dtype=dtype)
        assert rounds_weights(model, "compute")
        assert not rounds_weights(model, "exact")
        assert rounds_weights(model, "auto") == multiplies_natively(dtype, CPU)
        for setting in ("exact", "compute"):
            configure_backward(model, LearnerConfig(input_gradients=setting))
            assert model.gradients.fp32_input_grad == (setting == "exact")
    experts = experts_policy(BFLOAT16)
    assert not rounds_weights(experts, "exact")
    with pytest.raises(
        ConfigError,
        match=r"input_gradients is 'compute', but gradients through experts",
    ):
        rounds_weights(experts, "compute")


def test_compile_is_refused_without_a_compiler_or_engine_operators(
    monkeypatch: pytest.MonkeyPatch,
):
    model = policy()
    assert not compiles(model, False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert not compiles(model, "auto"), "on CPUs, where it gains little"
    monkeypatch.setattr(gradients, "compiler_missing", lambda device: None)
    for operators in ("engine", "transformers"):
        on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), operators=operators)
        assert compiles(on_gpu, "auto") is (operators == "engine")
    monkeypatch.undo()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(
        ConfigError,
        match=r"learner\.compile is true, but nothing .* TORCHDYNAMO_DISABLE is set; fix",
    ):
        compiles(model, True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler 'no-such-compiler'"):
        compiles(model, True)
    with pytest.raises(ConfigError, match="this model has transformers'"):
        compiles(policy(operators="transformers"), True)


@pytest.mark.parametrize("kind", [torch.float32, BFLOAT16])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 3, 5),
        (300, 9000, 4),
        (17, 64, 33),
        (1100, 576, 192),
    ],
)
def test_weight_gradients_are_exact_products_summed_in_fp32(
    kind: torch.dtype, shape: tuple[int, int, int]
):
    """Contract: total += dyᵀ x / scale with |error| ≤ (N + 2) 2⁻²³ (|total| + Σ|dy||x|) for
    operands of any dtype. 9000 rows make several blocks. A product rounded to bfloat16 would be off
    by 2⁻⁹.
    """
    tokens, rows, columns = shape
    dy = normal(tokens, rows, seed=1).to(kind)
    x = normal(tokens, columns, seed=2).to(kind)
    start = normal(rows, columns, seed=3)
    made = Gradients()
    made.scale = 8.0
    total = start.clone()
    add_weight_gradient(total, dy, x, made)
    exact = start.double() + dy.double().t() @ x.double() / 8
    magnitudes = dy.double().abs().t() @ x.double().abs()
    size = start.double().abs() + magnitudes / 8
    error = (total.double() - exact).abs()
    assert (error <= (tokens + 2) * 2.0**-23 * size).all()


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_weight_gradients_of_low_bit_activations_are_rounded_once(scheme: str):
    """Contract: the error is at most u Σ|dy||x̂| with bfloat16's u = 2⁻⁹, beside that of fp32 sums.

    Products of other fp32 tensors are as they were afterwards. Blind spot: on CPUs without units
    for bfloat16, operands are not rounded, and this passes by a wide margin.
    """
    tokens = 300
    x = quantize_activation(heavy(tokens, 192, seed=3).bfloat16(), get_scheme(scheme))
    dy = normal(tokens, 96, seed=4).bfloat16()
    a = normal(64, 256, seed=5)
    before = a @ a.t()
    total = torch.zeros(96, 192)
    add_weight_gradient(total, dy, x, Gradients())
    values = x.dequantized(torch.float32).double()
    error = (total.double() - dy.double().t() @ values).abs()
    magnitudes = dy.double().abs().t() @ values.abs()
    assert (error <= (2.0**-9 + tokens * 2.0**-23) * magnitudes).all()
    assert torch.equal(a @ a.t(), before)


@pytest.mark.parametrize("kind", ["bf16", "w4a16", "w8a8", "experts"])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_gradients_added_in_place_are_autograds(kind: str, loss_scale: float):
    """Contract: after two micro-batches without clearing, every master's gradient is autograd's
    sum, up to the order of fp32 sums. This includes the tied embedding, which two layers add to. A
    gradient that is lost or added twice would be off by its own size.
    """
    found = []
    for in_place in (False, True):
        model = experts_policy(BFLOAT16) if kind == "experts" else policy(kind)
        model.context.gradients.scale = loss_scale
        model.context.gradients.in_place = in_place
        totals: dict[str, torch.Tensor] = {}
        for lengths in ([9, 4], [17, 12, 3]):
            batch = random_batch(lengths, model.config.vocab_size)
            if in_place:
                logprobs, _ = token_logprobs(
                    model, batch.tokens, batch.response_mask, packed=batch.packed()
                )
                weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
                (logprobs * weights).sum().backward()
                totals = collected_gradients(model)
            else:
                _, part = logprob_gradients(model, batch, packed=batch.packed())
                totals = {n: g + totals[n] if totals else g for n, g in part.items()}
        found.append(totals)
    assert all(g.dtype == torch.float32 for g in found[1].values())
    assert all(g.any() for name, g in found[1].items() if ".experts." not in name)
    assert drift(found[1], found[0])[1] <= 1e-5


@pytest.mark.gpu
@needs_cuda("16-bit operands with an fp32 result")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cudas_weight_gradients_are_not_rounded(dtype: torch.dtype):
    """Contract: as on CPUs, products are exact and sums are fp32.

    A result rounded to 16 bits would fail by 2⁻⁹ or 2⁻¹² of its size.
    """
    dy = normal(200, 128, seed=1).to(dtype).cuda()
    x = normal(200, 64, seed=2).to(dtype).cuda()
    total = torch.zeros(128, 64, device="cuda")
    add_weight_gradient(total, dy, x, Gradients())
    exact = dy.double().t() @ x.double()
    magnitudes = dy.double().abs().t() @ x.double().abs()
    error = (total.double() - exact).abs()
    assert (error <= 202 * 2.0**-23 * magnitudes).all()


@given(
    st.integers(0, 40),
    st.integers(0, 9),
    st.integers(1, 50),
)
def test_blocks_are_all_rows_once(rows: int, columns: int, elements: int):
    """Contract: the blocks of every tensor are that tensor's rows in order.

    Each block is within the bound or is a single row.
    """
    wide = torch.arange(rows * columns).view(rows, columns)
    narrow = torch.arange(rows)
    with mock.patch.object(blocks, "_ELEMENTS", elements):
        parts = list(row_blocks(wide, narrow))
    assert torch.equal(torch.cat([p for p, _ in parts]), wide)
    assert torch.equal(torch.cat([p for _, p in parts]), narrow)
    assert all(len(p) <= 1 or p.numel() <= elements for p, _ in parts)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a8", "fp8-block", "nvfp4"])
def test_activations_by_blocks_are_those_of_all_rows(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """Contract: codes, scales and zero points of every token, and a weight gradient from them, are
    bit for bit those of all tokens at once. The gradient's own blocks have 16 tokens.
    """
    monkeypatch.setattr(backward, "_TOKENS", 16)
    x = heavy(41, 256, seed=3).bfloat16()
    dy = normal(41, 24, seed=4).bfloat16()
    whole = quantize_activation(x, get_scheme(scheme))
    expected = torch.zeros(24, 256)
    add_weight_gradient(expected, dy, whole, Gradients())
    for elements in (1, 3 * 256, 1 << 20):
        monkeypatch.setattr(blocks, "_ELEMENTS", elements)
        found = quantize_activation(x, get_scheme(scheme))
        for ours, theirs in zip(
            vars(found).values(),
            vars(whole).values(),
            strict=True,
        ):
            assert (
                torch.equal(as_bytes(ours), as_bytes(theirs))
                if torch.is_tensor(theirs)
                else ours == theirs
            )
        total = torch.zeros(24, 256)
        add_weight_gradient(total, dy, found, Gradients())
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probs_by_blocks_are_those_of_all_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Contract: log-probs, entropies and their gradient are bit for bit those of plain operators on
    the whole tensor.
    """
    logits = normal(37, 211, seed=1).to(dtype)
    targets = torch.arange(37) * 5
    dy = normal(37, 1, seed=2)[:, 0]
    logp = logits.log_softmax(-1, dtype=torch.float32)
    picked = logp.gather(-1, targets[:, None])[:, 0]
    entropies = -(logp.exp() * logp).sum(-1)
    gradient = logits.softmax(-1, dtype=torch.float32) * -dy[:, None]
    gradient = gradient.scatter_add(-1, targets[:, None], dy[:, None]).to(dtype)
    for elements in (1, 3 * 211, 1 << 20):
        monkeypatch.setattr(blocks, "_ELEMENTS", elements)
        leaf = logits.clone().requires_grad_()
        found = _Normalized.apply(leaf, targets, True, 1.0)
        assert torch.equal(found[0], picked)
        assert torch.equal(found[1], entropies)
        assert torch.equal(
            torch.autograd.grad(found[0], leaf, dy)[0],
            gradient,
        )
