"""Tests of gradients by CUDA's code path: values on CPU tensors, and operator calls on tensors
without values that claim to be on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qarl.quant.layers import grouped_backward
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.gradients import Gradients
from qarl.quant.layers.lora import Adapter
from qarl.quant.layers.straight_through import (
    _operands,
    add_weight_gradient,
    product_in_fp32,
)
from qarl.quant.limits import LARGEST_PRODUCT
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.schemes import get_scheme
from tests.support.fake_cuda import Calls, fake_cuda
from tests.support.layers import collected, make_experts, routed, textbook_gradients
from tests.support.tensors import normal, relative_error, seeded

BF16 = torch.bfloat16


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8", "fp8", "fp8-block", "nvfp4"])
def test_weight_gradients_of_quantized_activations_by_tensor_cores(scheme: str):
    """Contract: operands have the gradient's dtype and |error| ≤ (2⁻⁹ + N 2⁻²³) Σ|dy||x̂|.

    On a GPU no product is in fp32.
    """
    low_bit = quantize_activation(normal(200, 128, seed=1).to(BF16), get_scheme(scheme))
    dy = normal(200, 64, seed=2).to(BF16)
    left, right = _operands(dy, low_bit)
    assert left.dtype == right.dtype == BF16
    x = low_bit.dequantized(torch.float32).double()
    exact = dy.double().t() @ x
    magnitudes = dy.double().abs().t() @ x.abs()
    error = (product_in_fp32(left, right).double() - exact).abs()
    assert (error <= (2.0**-9 + 202 * 2.0**-23) * magnitudes).all()
    if low_bit.codes.dtype == torch.uint8:
        return  # whose table of values is no tensor of that kind
    with fake_cuda() as calls:
        there = quantize_activation(
            torch.empty(200, 128, dtype=BF16, device="cuda"), get_scheme(scheme)
        )
        total = torch.empty(64, 128, device="cuda")
        dy = torch.empty(200, 64, dtype=BF16, device="cuda")
        add_weight_gradient(total, dy, there, Gradients())
    assert calls.dtypes == {BF16}


def grouped_gradients(
    experts: RoutedLowBitExperts,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    grouped: bool,
):
    """Return the gradients of the input, the routing weights and all trained tensors, with or
    without grouped products.
    """
    monkeypatch.setattr(RoutedLowBitExperts, "multiplies_grouped", lambda self, dy: grouped)
    weights, index = routed(tokens)
    index = torch.where(index == 3, 4, index)  # no token for expert 3, some twice to 4
    x = normal(tokens, 128, seed=6).to(BF16).requires_grad_()
    weights.requires_grad_()
    dy = normal(tokens, 128, seed=7).to(BF16)
    for leaf in (*experts.masters, *experts.factors):
        leaf.grad = None
    experts(x, index, weights).backward(dy)
    trained = experts.factors or experts.masters
    return (
        x.detach(),
        weights.detach(),
        index,
        dy,
    ), collected(x, weights, *trained)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16-g32", "w8a8", "fp8", "nvfp4"])
def test_experts_gradients_by_grouped_products(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """Contract: gradients are within 2 % of autograd's in float64, and within 4 % if some rounded
    activations fall on other codes. Tokens come in several parts, and one expert has none. A wrong
    order of rows, weight or expert would be off by its own size.
    """
    monkeypatch.setattr(grouped_backward, "GROUPED_TOKENS", 16)
    experts = make_experts(scheme)
    inputs, found = grouped_gradients(experts, 40, monkeypatch, grouped=True)
    expected = textbook_gradients(experts, *inputs)
    for gradient, other in zip(found, expected, strict=True):
        assert relative_error(gradient.double(), other) < (
            0.04 if experts.quantizes_activations else 0.02
        )
    assert not found[2][3].any()
    assert not found[3][3].any()


def test_experts_adapters_by_grouped_products(monkeypatch: pytest.MonkeyPatch):
    experts = make_experts("w4a16-g32")
    generator = seeded(0)
    adapters = [Adapter(master, 8, 16.0, generator) for master in experts.masters]
    for place, adapter in enumerate(adapters):
        experts.adapt(place, adapter)
        torch.nn.init.normal_(adapter.lora_B, std=0.02, generator=generator)
    for master in experts.masters:
        master.requires_grad_(False)
    experts.refresh()
    experts.context.gradients.scale = 4.0
    _, grouped = grouped_gradients(experts, 40, monkeypatch, True)
    _, one_by_one = grouped_gradients(experts, 40, monkeypatch, False)
    assert len(grouped) == 6
    for ours, theirs in zip(grouped, one_by_one, strict=True):
        assert relative_error(ours.double(), theirs.double()) < 0.02


def test_grouped_products_make_as_many_calls_for_any_number_of_experts():
    """Contract: the number of calls does not depend on the number of experts, and none reads a
    value, which would make the host wait.
    """

    def gated(merged: torch.Tensor) -> torch.Tensor:
        gate, up = merged.chunk(2, dim=-1)
        return F.silu(gate) * up

    counts = []
    for count in (4, 128):
        there = {"device": "meta", "dtype": BF16}
        gate_up = torch.empty(count, 64, 32, **there)
        down = torch.empty(count, 32, 32, **there)
        x = torch.empty(50, 32, **there)
        weights = torch.empty(50, 2, device="meta")
        index = torch.zeros(50, 2, dtype=torch.int64, device="meta")
        with Calls() as calls:
            (part,) = grouped_backward.token_gradients(
                x, weights, index, x, (gate_up, down), gated, lambda used: used
            )
            shapes = [tuple(matrix.dense().shape) for matrix in part.matrices]
        assert shapes == [(count, 64, 32), (count, 32, 32)]
        assert part.x.shape == x.shape
        assert part.weights.shape == weights.shape
        counts.append(len(calls.names))
    assert counts[0] == counts[1] < 100


def test_a_heads_weight_gradient_is_multiplied_in_parts():
    """Contract: beside the gradient itself, 128 MiB are allocated of an output head's 1.2 GB
    (Qwen3-1.7B), and every row is computed once.
    """
    rows: list[int] = []
    largest = 0

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if func._schema.name == "aten::mm":
                rows.append(len(result))
                largest = max(largest, result.numel() * result.element_size())
            return result

    with fake_cuda(), Products():
        total = torch.empty(151936, 2048, device="cuda")
        dy = torch.empty(512, 151936, dtype=BF16, device="cuda")
        x = torch.empty(512, 2048, dtype=BF16, device="cuda")
        add_weight_gradient(total, dy, x, Gradients())
    assert sum(rows) == 151936
    assert largest <= 4 * LARGEST_PRODUCT == 2**27
