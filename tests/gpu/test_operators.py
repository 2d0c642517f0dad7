"""Tests of the learner's operators on a GPU against the engine's, and of its backwards against
CPUs'. Nothing here has run yet.

Axes: N tokens, C columns, H heads, D head size, E experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.router.router_factory import (
    create_fused_moe_router,
)
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from qarl.quant.checkpoint.families import ExpertLayout, ExpertsShape
from qarl.quant.graph import operators
from qarl.quant.graph.attention import attention, torch_attention
from qarl.quant.graph.experts import weights_of
from qarl.quant.graph.packing import Sequences, pack
from qarl.quant.kernels.activations import multiplied_activation
from qarl.quant.kernels.base import Scoring
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.materialize.activations import quantize_activation
from qarl.quant.schemes import get_scheme
from tests.support.kernels import needs_cuda
from tests.support.operators import differentiated, make_operator, rope
from tests.support.tensors import pairwise_equal, relative_error, seeded

pytestmark = [pytest.mark.gpu, needs_cuda("the operators of GPUs")]
BF16 = torch.bfloat16
LENGTHS = [300, 1, 77, 1024, 2]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed)).cuda().to(BF16)


OPERATORS: dict[str, tuple[Callable[[], CustomOp], list[int]]] = {
    "norm": (lambda: RMSNorm(2048), [2048]),
    "norm of a sum": (lambda: RMSNorm(2048), [2048, 2048]),
    "Gemma's norm of a sum": (lambda: GemmaRMSNorm(2048), [2048, 2048]),
    "rotation": (rope(128), [2048, 1024]),
    "rotation of neighbours": (rope(128, 0.5, neox=False), [2048, 1024]),
    "gate": (lambda: SiluAndMul(), [6144]),
    "GELU's gate": (lambda: GeluAndMul(), [6144]),
}


@pytest.mark.parametrize("tokens", [1, 4096])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_the_engines_kernels_with_gradients(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
):
    """Contract: values and gradients, including the masters', are near those of vLLM's native form
    in fp32. No input is changed.
    """
    make, columns = OPERATORS[name]
    operator = make_operator(make, BF16, device="cuda")
    exact = make_operator(make, torch.float32, device="cuda")
    leaves = [values(tokens, n, seed=seed).requires_grad_() for seed, n in enumerate(columns)]
    before = [t.detach().clone() for t in leaves]
    positions = [torch.arange(tokens, device="cuda")] if "rotation" in name else []
    y, ours = differentiated(
        operator, [*positions, *leaves], [w.master for w in operator.weights.values()]
    )
    assert pairwise_equal(leaves, before)
    exact.method = exact.native
    monkeypatch.setattr(operators, "_written_out", lambda operator: None)
    fp32 = [*positions, *(t.float().requires_grad_() for t in before)]
    with operators._natively():
        expected, theirs = differentiated(
            exact,
            fp32,
            [w.master for w in exact.weights.values()],
        )
    for a, b in zip([*y, *ours], [*expected, *theirs], strict=True):
        assert relative_error(a, b) < 0.01


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": False},
    "renormalized": {},
    "sigmoid": {"scoring_func": "sigmoid"},
    "groups": {
        "use_grouped_topk": True,
        "num_expert_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_weights_of_the_routers_choice_are_the_routers(kind: str, corrected: bool):
    """Contract: this holds in fp32, whichever kernel routes."""
    bias = values(128, seed=1).float() if corrected else None
    router: Any = create_fused_moe_router(8, 128, **ROUTERS[kind], e_score_correction_bias=bias)
    logits = values(4096, 128)
    weights, index = router._select_experts(values(4096, 64), logits)
    torch.testing.assert_close(weights_of(router, logits, index), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8"])
def test_activation_codes_are_near_those_of_cpus(scheme: str):
    """Contract: GPUs divide where CPUs multiply by a reciprocal, so a few codes differ, but no
    scale does.
    """
    x = values(512, 2048)
    ours = multiplied_activation(x, get_scheme(scheme))
    cpus = quantize_activation(x, get_scheme(scheme))
    torch.testing.assert_close(
        ours.scale.float(),
        cpus.scale.float(),
        rtol=1e-6,
        atol=0.0,
    )
    equal = ours.codes.float() == cpus.codes.float()
    assert float(equal.double().mean()) > 0.99


_SEEN, _SHARED = torch.tensor(
    [
        [300, 201, 77, 1024, 30],
        [0, 200, 0, 170, 29],
    ]
)
_LEADER = torch.tensor([0, 0, 2, 0, 2])
SEQUENCES = {
    "apart": Sequences.apart(LENGTHS),
    "shared prompts": pack(_SEEN, 1024, _SHARED, leader=_LEADER).sequences,
}
SINKS = torch.linspace(-1.0, 2.0, 32).to(BF16)
SCORINGS = {
    "plain": Scoring(scale=128**-0.5),
    "window": Scoring(scale=128**-0.5, window=100),
    "cap": Scoring(scale=128**-0.5, cap=5.0),
    "ALiBi": Scoring(scale=128**-0.5, slopes=torch.linspace(0.01, 0.5, 32)),
    "sinks": Scoring(scale=128**-0.5),
}


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("groups", [4, 16])
def test_attention_and_its_gradients_are_torchs_in_fp32(groups: int, scoring: str, sequences: str):
    """Contract: values and gradients are near those of torch's attention of each sequence by itself
    in fp32.
    """
    row = SEQUENCES[sequences]
    row = dataclasses.replace(
        row,
        places=None if row.places is None else row.places.cuda(),
    )
    heads = [(32, 1), (groups, 2), (groups, 3)]
    leaves = [
        values(sum(row.lengths), count, 128, seed=seed).requires_grad_() for count, seed in heads
    ]
    leaves += [SINKS.cuda().requires_grad_()] * (scoring == "sinks")
    how = SCORINGS[scoring], row
    y, ours = differentiated(
        lambda q, k, v, s=None: attention(q, k, v, s, *how),
        leaves,
    )
    exact = [t.detach().float().requires_grad_() for t in leaves]
    expected, theirs = differentiated(
        lambda q, k, v, s=None: torch_attention(q, k, v, s, *how), exact
    )
    assert relative_error(y[0], expected[0]) < 0.01
    assert all(relative_error(a, b) < 0.02 for a, b in zip(ours, theirs, strict=True))


def test_gradients_of_128_experts_at_once_are_those_of_the_loop():
    """The shape is a real layer's (Qwen3-30B-A3B): 16,384 tokens of 8 experts, and one expert
    without any.
    """
    shape = ExpertsShape(128, 8, 2048, 768, "silu", ExpertLayout())
    gate_up = nn.Parameter(values(128, 1536, 2048).float() * 0.03)
    down = nn.Parameter(values(128, 2048, 768).float() * 0.03)
    context = LayerContext(BF16, "reference")
    experts = RoutedLowBitExperts(
        "model.layers.0.mlp.experts", gate_up, down, shape, get_scheme("w4a16"), context
    )
    experts.refresh()
    x = values(16384, 2048, seed=3).requires_grad_()
    logits = values(16384, 128, seed=4)
    logits[:, 5] = -100.0
    weights, index = logits.float().softmax(-1).topk(8)
    dy = values(16384, 2048, seed=5)
    gradients = []
    for grouped in (True, False):
        experts.multiplies_grouped = lambda dy, grouped=grouped: grouped  # type: ignore[method-assign]
        gradients.append(
            torch.autograd.grad(
                experts(x, index, weights),
                [x, gate_up, down],
                dy,
            )
        )
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a.float(), b.float()) < 0.02
