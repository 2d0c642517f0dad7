"""Tests of routing in the graph: the engine's weights, also for experts chosen elsewhere, and their
gradients. Blind spot: the kernels that route on GPUs (tests/gpu). Here a router has one of their
classes and the arithmetic of CPUs.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
    FusedTopKBiasRouter,
)
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    FusedTopKRouter,
)
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import (
    GroupedTopKRouter,
)

from qarl.configs.errors import GraphError
from qarl.quant.graph.experts import RoutedLayer, weights_of
from qarl.quant.graph.kinds import _of_experts
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.kernels.vllm_gpu import load_plugins
from tests.support.tensors import normal, relative_error

LOGITS = normal(9, 16, seed=1).bfloat16()
PULL = normal(9, 4, seed=2)
HIDDEN = torch.zeros(9, 8)
GROUPS = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CORRECTED = {"scoring_func": "sigmoid", "e_score_correction_bias": normal(16, seed=3)}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"renormalize": False},
    "renormalized": {},
    "groups": {**GROUPS, "renormalize": False},
    "groups, renormalized": GROUPS,
    "groups, corrected": {**GROUPS, **CORRECTED},
}


def router(kind: str) -> CPURouter:
    return CPURouter(4, 16, use_grouped_topk="groups" in kind, **KINDS[kind])


def formula(logits: torch.Tensor, index: torch.Tensor, kind: str) -> torch.Tensor:
    how = KINDS[kind]
    scores = (logits.sigmoid() if "corrected" in kind else logits.softmax(-1)).gather(
        -1, index.long()
    )
    scores = scores / scores.sum(-1, keepdim=True) if how.get("renormalize", True) else scores
    return scores * how.get("routed_scaling_factor", 1.0)


def layer(kind: str) -> Any:
    """Return a routed layer whose experts return their input."""
    runner = SimpleNamespace(
        routed_experts=SimpleNamespace(apply_router_weight_on_input=False),
        layer_id=3,
        layer_name="layers.3.experts",
        moe_config=SimpleNamespace(
            activation=SimpleNamespace(value="silu"),
            has_bias=False,
            swiglu_limit=None,
            swiglu_alpha=None,
            is_act_and_mul=True,
        ),
        _fse_fuse_gate=False,
        _shared_experts=None,
        gate=None,
        router=router(kind),
    )
    return RoutedLayer(runner, lambda hidden, index, weights: (index, weights), RouterLog())  # type: ignore[arg-type]


GPUS = {
    "softmax": FusedTopKRouter(4, 16, renormalize=False),
    "groups": GroupedTopKRouter(4, 16, **KINDS["groups"]),
    "groups, renormalized": GroupedTopKRouter(4, 16, **GROUPS),
    "groups, corrected": FusedTopKBiasRouter(4, 16, routed_scaling_factor=2.5, **CORRECTED),
}


@pytest.mark.parametrize("kind", GPUS)
def test_routers_of_gpus_have_the_formulas_weights(kind: str):
    """Contract: weights follow the formula from fp32 logits, with a factor if there is one,
    whatever the router's class.
    """
    index = LOGITS.argsort(-1)[:, 2:6]
    torch.testing.assert_close(
        weights_of(GPUS[kind], LOGITS.float(), index),
        formula(LOGITS.float(), index, kind),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_experts_replace_the_routers_choice(kind: str):
    """Contract: -1 keeps the router's choice.

    Experts that the router chose have its weights bit for bit, from bfloat16 logits; other experts
    have theirs up to bfloat16's rounding of an exponent. In fp32 a plain softmax has other bits.
    """
    routed = layer(kind)
    index, weights = routed(HIDDEN, LOGITS, None, None)
    routed.replayed = torch.full((9, 4), -1, dtype=torch.int16)
    others = [15, 0, 7, 8]
    routed.replayed[2:5] = index[2:5]
    routed.replayed[5:] = torch.tensor(others)
    mixed, theirs = routed(HIDDEN, LOGITS, None, None)
    assert mixed[:5].tolist() == index[:5].tolist()
    assert mixed[5:].tolist() == [others] * 4
    assert theirs.dtype == torch.float32
    assert torch.equal(theirs[:5], weights[:5])
    assert torch.equal(weights_of(router(kind), LOGITS.float(), index), weights) is (
        "groups" in kind
    )
    torch.testing.assert_close(
        theirs,
        formula(LOGITS.float(), mixed, kind),
        rtol=0.04,
        atol=0.0,
    )


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formula(kind: str, replayed: bool):
    """Contract: gradients are autograd's in fp32, up to bfloat16's roundings, for the router's
    choice and for another one.
    """
    routed = layer(kind)
    leaf = LOGITS.clone().requires_grad_()
    exact = LOGITS.float().requires_grad_()
    routed.replayed = LOGITS.argsort(-1)[:, 2:6].int() if replayed else None
    index, weights = routed(HIDDEN, leaf, None, None)
    (ours,) = torch.autograd.grad(weights, leaf, PULL)
    (theirs,) = torch.autograd.grad(formula(exact, index, kind), exact, PULL)
    assert relative_error(ours, theirs) < 0.01


def test_a_routers_kernels_bits_are_used_with_the_formulas_gradient(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: if autograd does not see into the router, as on GPUs, values are the kernel's bits
    and gradients are the formula's.
    """
    routed = layer("softmax")
    exact = LOGITS.float().softmax(-1).topk(4)
    others = exact.values * (1 + 3e-7)
    leaf = LOGITS.clone().requires_grad_()
    monkeypatch.setattr(
        routed._runner.router,
        "_select_experts",
        lambda *_, **__: (others, exact.indices),
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    index, weights = routed(HIDDEN, leaf, None, None)
    assert torch.equal(weights, others)
    assert not torch.equal(others, exact.values)
    assert torch.equal(index, exact.indices)
    monkeypatch.undo()
    expected = torch.autograd.grad(
        weights_of(router("softmax"), leaf.float(), index),
        leaf,
        PULL,
    )
    assert torch.equal(
        torch.autograd.grad(weights, leaf, PULL)[0],
        expected[0],
    )


def test_routers_without_a_known_gradient_are_refused():
    routed = layer("softmax")
    routed._runner.router.scoring_func = "sqrtsoftplus"
    routed._runner.moe_config.has_bias = True
    assert (
        _of_experts(routed._runner) == "experts with biases and a router by the root of a softplus"
    )
    own = CPURouter(4, 16, custom_routing_function=lambda **_: None)
    with pytest.raises(GraphError, match="CPURouter routes by a function of its model's"):
        weights_of(own, LOGITS, torch.zeros(9, 4))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, normal(16, seed=3)], ids=["no bias", "bias"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_router_without_groups_chooses_by_corrected_scores(
    scoring: str, bias: torch.Tensor | None, renormalize: bool
):
    """Contract: the formula of vLLM's routers on GPUs: a bias changes the choice, not the weights,
    and only corrected weights are scaled.
    """
    load_plugins()
    own = CPURouter(
        4,
        16,
        scoring_func=scoring,
        e_score_correction_bias=bias,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
    )
    weights, index = own._compute_routing(HIDDEN, LOGITS, None)
    scores = LOGITS.float().sigmoid() if scoring == "sigmoid" else LOGITS.float().softmax(-1)
    best = (scores if bias is None else scores + bias).topk(4).indices
    chosen = scores.gather(-1, index.long())
    expected = chosen / chosen.sum(-1, keepdim=True) if renormalize else chosen
    assert torch.equal(index.long().sort().values, best.sort().values)
    scale = 1.0 if bias is None else 2.5
    # softmax alone is vLLM's own, in bfloat16
    tolerance = 2e-2 if bias is None and scoring == "softmax" else 1e-6
    assert relative_error(weights, scale * expected) < tolerance
    assert relative_error(weights_of(own, LOGITS, index), weights) < 1e-6
