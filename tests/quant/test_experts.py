"""Tests of a layer of routed low-bit experts: its products against vLLM's dense layers, and its
straight-through gradients.
"""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qarl.quant.kernels import make_factory
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.schemes import SCHEMES, get_scheme
from tests.support.kernels import CPU_SCHEMES, TRUNCATES, no_cuda, products
from tests.support.layers import (
    SHAPE,
    as_multiplied,
    kept_tensors,
    make_experts,
    routed,
    textbook_gradients,
    unpacked,
)
from tests.support.tensors import heavy, normal, relative_error

STEP = {
    "w8a8": 0.008,
    "w4a8": 0.012,
    "fp8": 0.025,
    "fp8-block": 0.025,
    "w4afp8": 0.06,
    "nvfp4": 0.05,
}
"""Relative error allowed if codes of activations between the two products round to the neighbouring
code.
"""

SUMMED = (SHAPE.hidden + SHAPE.intermediate) * torch.finfo(torch.float32).eps / 2
"""Relative error allowed for two consecutive fp32 sums of I terms: √I half units of Σ|x||w| each
(`test_linear.summation_error`), which for terms of random sign is √I of the sum. It is visible in
float32 only.
"""
ROUTINGS = {
    "random": (SHAPE, lambda: routed(23)),
    "one token": (SHAPE, lambda: routed(1)),
    "two experts idle": (
        SHAPE,
        lambda: (
            routed(9)[0],
            torch.tensor(
                [
                    [4, 1],
                    [1, 2],
                    [2, 4],
                ]
                * 3
            ),
        ),
    ),
    "all to the same": (
        SHAPE,
        lambda: (
            routed(7)[0],
            torch.tensor([[3, 0]] * 7),
        ),
    ),
    "one expert a token": (
        replace(SHAPE, top_k=1),
        lambda: (
            torch.ones(11, 1),
            torch.arange(11)[:, None] % 5,
        ),
    ),
    "every expert for every token": (
        replace(SHAPE, experts=3, top_k=3),
        lambda: (
            normal(4, 3, seed=1).softmax(-1),
            torch.tensor([[2, 0, 1]] * 4),
        ),
    ),
    "weights that do not sum to one": (
        SHAPE,
        lambda: (routed(6)[0] * 2.5, routed(6)[1]),
    ),
}
routings = pytest.mark.parametrize("routing", ROUTINGS)


@no_cuda
def test_experts_of_unknown_forms_are_refused():
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from qarl.quant.kernels.vllm_cpu.experts import PerExpertMethod

    usual = {
        "has_bias": False,
        "use_ep": False,
        "apply_router_weight_on_input": False,
    }
    for name in usual:
        form = SimpleNamespace(**usual | {name: not usual[name]})
        layer: Any = SimpleNamespace(**vars(form), moe_config=form, activation=MoEActivation.SILU)
        with pytest.raises(
            ValueError,
            match="mlp: per-expert products cover experts without bias",
        ):
            PerExpertMethod(Any, layer, "mlp", False)  # type: ignore[arg-type]


@no_cuda
@routings
@products(vllm=CPU_SCHEMES[1:])
def test_vllms_experts_are_its_dense_layers_one_by_one(
    kernel: str, scheme: str, dtype: torch.dtype, routing: str
):
    """Contract: the output is, bit for bit, Σ w_k · down(silu(gate)·up) with the dense layers that
    vLLM builds for each expert's own matrices and vLLM's activation, summed in fp32 in the order of
    expert numbers and rounded once. tests/engine/test_experts_engine.py compares the module with
    the one inside a running engine.
    """
    shape, route = ROUTINGS[routing]
    experts = make_experts(scheme, kernel, dtype, shape)
    weights, index = route()
    x = heavy(len(index), shape.hidden, seed=9, rows=False).to(dtype)
    factory = make_factory(kernel, dtype)
    total = torch.zeros(x.shape)
    with torch.no_grad():
        y = experts(x, index, weights)
        for e, expert in enumerate(experts.codes().experts):
            chosen = index == e
            rows = chosen.any(-1).nonzero()[:, 0]
            if not len(rows):
                continue
            merged = factory.linear(f"{experts.layer}.{e}.gate_proj", [expert.gate_up], [None])(
                x[rows]
            )
            hidden = torch.empty(len(rows), shape.intermediate, dtype=dtype)
            torch.ops._C.silu_and_mul(hidden, merged)
            out = factory.linear(f"{experts.layer}.{e}.down_proj", [expert.down], [None])(hidden)
            total[rows] += out.float() * (weights * chosen).sum(-1)[rows, None]
    assert y.dtype == dtype
    assert torch.equal(y, total.to(dtype))


def exact_output(
    experts: RoutedLowBitExperts,
    x: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    masters: bool = False,
) -> torch.Tensor:
    """Compute the output in float64, token by token.

    If `masters` is true, multiply the unquantized masters.
    """
    y = torch.zeros(x.shape, dtype=torch.float64)
    codes = experts.codes().experts
    for n in range(len(x)):
        for weight, e in zip(
            weights[n].tolist(),
            index[n].tolist(),
            strict=True,
        ):
            gate_up, down = (master.detach()[e].double() for master in experts.masters)
            token = x[n : n + 1]
            if not masters:
                gate_up = unpacked(codes[e].gate_up)
                down = unpacked(codes[e].down)
                token = as_multiplied(token, experts)
            gate, up = (token.double() @ gate_up.t()).chunk(
                2,
                dim=-1,
            )
            hidden = F.silu(gate) * up
            if not masters:
                hidden = as_multiplied(hidden, experts)
            y[n] += weight * (hidden @ down.t())[0]
    return y


@pytest.mark.parametrize("routing", ["random", "one expert a token"])
@products(vllm=CPU_SCHEMES, reference=SCHEMES)
def test_the_product_is_that_of_the_published_codes(
    kernel: str, scheme: str, dtype: torch.dtype, routing: str
):
    """Contract: the output is within BOUND of float64 on codes and scales, including quantized
    activations. The product of the masters is further off for coarse codes, so a kernel that read
    other weights would be noticed.
    """
    shape, route = ROUTINGS[routing]
    experts = make_experts(scheme, kernel, dtype, shape)
    weights, index = route()
    x = heavy(len(index), shape.hidden, seed=9, rows=False).to(dtype)
    with torch.no_grad():
        y = experts(x, index, weights)
    exact, unquantized = (
        exact_output(experts, x, weights, index, masters) for masters in (False, True)
    )
    bound = 1.5 * torch.finfo(dtype).eps + SUMMED + STEP.get(scheme, 0.0)
    if TRUNCATES and kernel == "vllm" and scheme.startswith("w4a16") and dtype == torch.bfloat16:
        bound *= 2
    assert relative_error(y, exact) <= bound
    args = get_scheme(scheme).weights
    if args is not None and (args.num_bits == 4 or dtype != torch.bfloat16):
        assert relative_error(unquantized, exact) > 1.4 * bound


@no_cuda
@pytest.mark.parametrize("kind", ["linear", "experts"])
@pytest.mark.parametrize("scheme", CPU_SCHEMES)
def test_an_old_weight_version_is_freed_at_once(scheme: str, kind: str):
    """Contract: no reference cycle keeps a replaced product alive; with large models each would
    hold gigabytes.
    """
    experts = make_experts(scheme, "vllm").codes()
    factory = make_factory("vllm", torch.bfloat16)
    gc.disable()
    try:
        if kind == "linear":
            product: Any = factory.linear("layer", [experts.experts[0].down], [None])
        else:
            product = factory.experts("model.layers.1.mlp.experts", SHAPE, experts)
        watched = weakref.ref(getattr(product, f"_{kind}"))
        del product
        assert watched() is None
    finally:
        gc.enable()


def own_gradients(
    experts: RoutedLowBitExperts,
    x: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    dy: torch.Tensor,
) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    weights = weights.clone().requires_grad_()
    experts(x, index, weights).backward(dy)
    return [leaf.grad for leaf in (x, weights, *experts.masters) if leaf.grad is not None]


@routings
@pytest.mark.parametrize(
    ("scheme", "aligned"),
    [
        *((scheme, True) for scheme in SCHEMES),
        ("w8a8", False),
    ],
)
def test_gradients_are_those_of_straight_through_fake_quantization(
    scheme: str, aligned: bool, routing: str
):
    """Contract: gradients of inputs, routing weights and both masters equal autograd's through
    dequantized weights and activations with every rounding as identity, in the relative Frobenius
    norm: 1e-5, or 2e-3 if codes of the second product's activations may round differently. Experts
    without a token get exact zeros. Gradients without quantized activations are further off than
    that bound. Blind spot: the codes are quant's own.
    """
    shape, route = ROUTINGS[routing]
    experts = make_experts(scheme, "reference", torch.float32, shape, aligned)
    weights, index = route()
    x = heavy(len(index), shape.hidden, seed=9, rows=False)
    dy = heavy(len(index), shape.hidden, seed=11, rows=False)
    ours = own_gradients(experts, x, weights, index, dy)
    theirs = textbook_gradients(experts, x, weights, index, dy)
    bound = 2e-3 if experts.quantizes_activations else 1e-5
    assert len(ours) == len(theirs) == 4
    for given, expected in zip(ours, theirs, strict=True):
        assert given.dtype == torch.float32
        assert relative_error(given, expected) <= bound
    idle = [e for e in range(shape.experts) if not (index == e).any()]
    assert not ours[2][idle].any()
    assert not ours[3][idle].any()
    if experts.quantizes_activations:
        other = textbook_gradients(experts, x, weights, index, dy, activations=False)
        for unquantized, expected in zip(other[1:], theirs[1:], strict=True):
            assert relative_error(unquantized, expected) > bound


@products(vllm=CPU_SCHEMES, reference=SCHEMES)
@pytest.mark.parametrize(
    "master_dtype",
    [torch.float32, torch.bfloat16],
    ids=["fp32-masters", "bf16-masters"],
)
def test_gradients_in_a_low_compute_dtype(
    kernel: str, scheme: str, dtype: torch.dtype, master_dtype: torch.dtype
):
    """Contract: whichever kernel multiplied, each gradient has the dtype of its tensor and is
    within the bound of the forward.
    """
    experts = make_experts(scheme, kernel, dtype, master_dtype=master_dtype)
    weights, index = routed(23)
    x = heavy(23, 128, seed=9, rows=False).to(dtype)
    dy = normal(23, 128, seed=11).to(dtype)
    ours = own_gradients(experts, x, weights, index, dy)
    theirs = textbook_gradients(experts, x, weights, index, dy)
    kept = (dtype, torch.float32, master_dtype, master_dtype)
    for given, expected, kind in zip(ours, theirs, kept, strict=True):
        assert given.dtype == kind
        coarsest = max(torch.finfo(kind).eps, torch.finfo(dtype).eps)
        assert relative_error(given, expected) <= 1.5 * coarsest + SUMMED + STEP.get(scheme, 0.0)


def test_frozen_masters_and_inputs_get_no_gradient():
    """Contract: frozen masters and inputs get no gradient, and the gradients of the others have the
    same bits.
    """
    weights, index = routed(9)
    x = heavy(9, 128, seed=9, rows=False).bfloat16()
    dy = normal(9, 128, seed=11).bfloat16()
    everything = own_gradients(make_experts("w8a8"), x, weights, index, dy)
    frozen = make_experts("w8a8")
    frozen.gate_up_proj.requires_grad_(False)
    experts_input = x.clone()
    frozen(experts_input, index, weights).backward(dy)
    assert experts_input.grad is None
    assert frozen.gate_up_proj.grad is None
    assert frozen.down_proj.grad is not None
    assert torch.equal(frozen.down_proj.grad, everything[3])


KEPT = {
    "w8a8": (1, 4),
    "w4a8": (1, 8),
    "fp8": (1, 4),
    "w4afp8": (1, 4),
    "fp8-block": (1, 4),
    "nvfp4": (0.5, 8),
}
"""Scheme → bytes of codes per value, and bytes of scales (with zero points) per token of 128
columns.
"""


@products(vllm=CPU_SCHEMES, reference=SCHEMES)
def test_the_backward_keeps_routing_and_low_bit_inputs_but_no_weights(
    kernel: str, scheme: str, dtype: torch.dtype
):
    """Contract: the backward keeps the routing (weights and expert numbers) and the layer's input,
    as codes of at most a byte with their scales if the scheme quantizes activations, otherwise in
    the compute dtype. It keeps no weight, dequantized or not, and nothing of the tokens inside the
    experts.
    """
    experts = make_experts(scheme, kernel, dtype)
    weights, index = routed(23)
    x = heavy(23, 128, seed=9, rows=False).to(dtype).requires_grad_()
    with kept_tensors() as saved:
        y = experts(x, index, weights)
    y.float().sum().backward()
    assert x.grad is not None
    a_value, a_token = KEPT.get(scheme, (dtype.itemsize, 0))
    routing_bytes = weights.nbytes + index.nbytes
    assert sum(t.nbytes for t in saved) == 23 * (128 * a_value + a_token) + routing_bytes
    assert max(t.numel() for t in saved) == 23 * 128 if a_value >= 1 else 23 * 64
