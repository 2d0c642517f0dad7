"""Tests of the gradient gate.

A gradient that is cut while values stay exact ends the run; each way in which this has happened is
planted in a model.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.configs.errors import GraphError
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.gradient_gate import require_gradients
from qarl.learner.processes import Processes
from qarl.quant.model.add_lora import add_adapters
from tests.support.learners import batch_of, experts_policy, logprob_gradients, policy

FIRST = "model.layers.0"


def by_data(run: Any) -> None:
    """Let a norm read its weight outside autograd."""
    run.model.norm._forward_method.weights = {}


def without_grad(run: Any) -> None:
    """Put a decorator that disables gradients around a forward."""
    attention = run.model.layers[0].self_attn
    attention.forward = torch.no_grad()(attention.forward)


def compiled_helper(run: Any) -> None:
    """Replace the activation by a helper that is one operator without a derivative to autograd."""
    act = run.model.layers[0].mlp.act_fn
    original = act._forward_method

    def forward(x: torch.Tensor) -> torch.Tensor:
        constant = x.detach()
        return original(constant) + 0 * constant.sum(-1, keepdim=True)

    act._forward_method = forward


def by_weight_of_its_own(run: Any) -> None:
    """Replace a linear layer by one that the graph does not know, which reads its weight as a plain
    tensor.
    """
    layer = run.model.layers[0].self_attn.o_proj
    part = layer.quant_method._stack.parts[0]
    layer.quant_method = SimpleNamespace(
        apply=lambda _, x, bias=None: x @ part.weight_used(x.dtype).t()
    )


TRAPS: dict[Callable[[Any], None], str] = {
    by_data: "'model.norm.weight'",
    without_grad: f"'{FIRST}.self_attn.q_proj.weight', '{FIRST}.self_attn.k_proj.weight'",
    compiled_helper: f"'{FIRST}.mlp.gate_proj.weight', '{FIRST}.mlp.up_proj.weight'",
    by_weight_of_its_own: f"'{FIRST}.self_attn.o_proj.weight'",
}


@pytest.mark.parametrize("plant", TRAPS, ids=lambda plant: plant.__name__)
def test_a_cut_gradient_is_refused_and_its_masters_are_named(
    plant: Callable[[Any], None],
):
    """Contract: log-probs stay the same up to rounding, and the gate names the masters without
    gradient. Blind spot: a gradient that is wrong but not zero; other tests compare gradients with
    transformers'.
    """
    model = policy("w8a8")
    before, _ = logprob_gradients(model, batch_of())
    require_gradients(model, Processes())
    plant(model.graph.module)
    after, _ = logprob_gradients(model, batch_of())
    assert (after - before).abs().max() < 0.2
    with pytest.raises(GraphError, match=f"no gradient reaches {re.escape(TRAPS[plant])}"):
        require_gradients(model, Processes())


def test_a_model_that_does_not_run_is_refused_with_its_error():
    model = policy("w8a8")
    model.graph.module.get_submodule("model.layers.1").forward = lambda *_: 1 / 0
    with pytest.raises(
        GraphError,
        match=r"could not be run and differentiated: ZeroDivisionError.*'transformers'",
    ):
        require_gradients(model, Processes())


def test_mixtures_and_adapters_pass_the_gate_and_keep_no_gradients():
    """Contract: a router that no module of transformers multiplies has its layer and its gradient;
    an adapter passes although its factor B starts at zero.
    """
    experts = experts_policy(torch.bfloat16)
    assert "model.layers.1.mlp.gate" in experts.linears
    adapted = policy()
    add_adapters(adapted, LoraConfig(rank=4, alpha=8), seed=0)
    for model in (experts, adapted):
        require_gradients(model, Processes())
        assert all(master.grad is None for master in model.masters.values())
