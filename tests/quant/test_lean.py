"""Operators with a backward of their own: the bits of the plain forward, autograd's gradients, and what is kept."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from qarl.quant.layers.gradients import Gradients
from qarl.quant.operators.autograd import Gated, RMSNorm, Rotate
from qarl.quant.runtime.compile import compiler_missing
from tests.support.layers import kept_tensors
from tests.support.tensors import heavy, normal

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
Operator = Callable[..., torch.Tensor]


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(weight.dtype) * weight


def plain_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.float().unsqueeze(2) + turned * sin.float().unsqueeze(2)).to(x.dtype)


def cases(dtype: torch.dtype, compiled: bool = False) -> dict[str, tuple[Operator, Operator, list[torch.Tensor], int]]:
    """Ours, the plain one, their tensors, and how many of those have gradients."""
    activation, made = nn.SiLU(), Gradients()
    made.compiled = compiled
    turns = torch.linspace(0, 40, 5 * 16).view(1, 5, 16).repeat(1, 1, 2)
    rows = heavy(2 * 5, 48, seed=1).view(2, 5, 48)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return RMSNorm.apply(x, weight, 1e-6, made)

    return {
        "norm": (norm, plain_norm, [rows.to(dtype), normal(48, seed=2).to(dtype)], 2),
        "norm of fp32": (norm, plain_norm, [rows, normal(48, seed=2).to(dtype)], 2),
        "rotation": (
            lambda x, cos, sin: Rotate.apply(x, cos, sin, made), plain_rotation,
            [normal(1, 5, 3, 32, seed=3).to(dtype), turns.cos().to(dtype), turns.sin().to(dtype)], 1,
        ),
        "gate": (
            lambda g, u: Gated.apply(g, u, activation, made), lambda g, u: activation(g) * u,
            [rows.to(dtype), normal(2, 5, 48, seed=4).to(dtype)], 2,
        ),
    }  # fmt: skip


def backward_of(operator: Operator, given: list[torch.Tensor], count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [t.clone().requires_grad_(i < count) for i, t in enumerate(given)]
    y = operator(*leaves)
    dy = normal(y.numel(), 1, seed=7).view(y.shape).to(y.dtype)
    return y.detach(), list(torch.autograd.grad(y, leaves[:count], dy))


@dtypes
@pytest.mark.parametrize("name", list(cases(torch.float32)))
def test_forward_bits_and_gradients_are_plain_torchs(name: str, dtype: torch.dtype):
    """Contract: the same bits forward; gradients are autograd's through the plain operators, up to 4 units in the
    last place of the tensor's largest value (autograd rounds more often, so it is not the nearer one)."""
    ours, plain, given, count = cases(dtype)[name]
    y, found = backward_of(ours, given, count)
    expected, theirs = backward_of(plain, given, count)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    for gradient, other, leaf in zip(found, theirs, given, strict=False):
        assert gradient.dtype == leaf.dtype == other.dtype
        bound = 4 * max(torch.finfo(dtype).eps, 1e-6) * float(other.abs().max())
        torch.testing.assert_close(gradient.float(), other.float(), rtol=0, atol=bound)


@pytest.mark.slow
@dtypes
@pytest.mark.parametrize("name", list(cases(torch.float32)))
def test_compiled_gradients_are_those_of_operators(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Contract: rounded where torch's operators round; sums and transcendentals of another order or library may move a
    last place. Blind spot: compiled for a CPU; Triton's code has not run."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    if compiler_missing("cpu"):
        pytest.skip("there is no C++ compiler")
    y, found = backward_of(cases(dtype, compiled=True)[name][0], *cases(dtype)[name][2:])
    expected, theirs = backward_of(cases(dtype)[name][0], *cases(dtype)[name][2:])
    assert torch.equal(y, expected)
    for gradient, other in zip(found, theirs, strict=True):
        assert gradient.dtype == other.dtype
        bound = max(torch.finfo(dtype).eps, 1e-6) * float(other.abs().max())
        torch.testing.assert_close(gradient.float(), other.float(), rtol=0, atol=bound)


def kept(operator: Operator, given: list[torch.Tensor], count: int) -> list[tuple[torch.dtype, int]]:
    with kept_tensors() as saved:
        operator(*(t.clone().requires_grad_(i < count) for i, t in enumerate(given)))
    return [(tensor.dtype, tensor.numel()) for tensor in saved]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("norm of fp32", [(torch.float32, 480), (torch.bfloat16, 48), (torch.float32, 10)]),
        ("rotation", [(torch.bfloat16, 160), (torch.bfloat16, 160)]),
        ("gate", [(torch.bfloat16, 480), (torch.bfloat16, 480)]),
    ],
)
def test_nothing_but_inputs_is_kept(name: str, expected: list[tuple[torch.dtype, int]]):
    """And a number a row for the norm. The plain operators keep more, so the hook sees what it should."""
    ours, plain, given, count = cases(torch.bfloat16)[name]
    assert kept(ours, given, count) == expected
    size = {True: 0, False: 0}
    for mine, operator in ((True, ours), (False, plain)):
        size[mine] = sum(dtype.itemsize * n for dtype, n in kept(operator, given, count))
    assert size[True] < size[False]


def test_a_norms_gradient_by_hand():
    """x = (3, 4), weight 1, no epsilon: rms² = 12.5, n = x / rms; for dy = (1, 0) dx = (1 - n₁²/2, -n₁n₂/2) / rms."""
    x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    RMSNorm.apply(x, torch.ones(2), 0.0, Gradients())[0, 0].backward()
    rms = 12.5**0.5
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[1 - 9 / 12.5 / 2, -12 / 12.5 / 2]]) / rms)
