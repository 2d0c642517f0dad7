"""A gradient that is cut while values stay exact: each way it has happened, in a model made for it,
ends the run.
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
    """A norm reads its weight outside autograd."""
    run.model.norm._forward_method.weights = {}


def without_grad(run: Any) -> None:
    """A decorator around a forward."""
    run.model.layers[0].self_attn.forward = torch.no_grad()(run.model.layers[0].self_attn.forward)


def compiled_helper(run: Any) -> None:
    """A helper that autograd sees as one operator without a derivative."""
    act = run.model.layers[0].mlp.act_fn
    kept = act._forward_method
    act._forward_method = lambda x: kept(x.detach()) + 0 * x.sum(-1, keepdim=True).detach()


def by_weight_of_its_own(run: Any) -> None:
    """A linear layer that the graph does not know as one: its weight is read as a tensor."""
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
def test_a_cut_gradient_is_told_with_the_masters_it_misses(
    plant: Callable[[Any], None],
):
    """Contract: log-probs are what they were, to the bit or a rounding, and the gate names the
    masters. Blind spot: a gradient that is wrong and not zero, which tests hold against
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


def test_a_model_that_does_not_run_is_told_in_words():
    model = policy("w8a8")
    model.graph.module.get_submodule("model.layers.1").forward = lambda *_: 1 / 0
    with pytest.raises(
        GraphError,
        match=r"could not be run and differentiated: ZeroDivisionError.*'transformers'",
    ):
        require_gradients(model, Processes())


def test_mixtures_and_adapters_pass_and_nothing_is_left_behind():
    """A router that no module of transformers multiplies has its layer and its gradient; B is zero
    at first.
    """
    experts = experts_policy(torch.bfloat16)
    assert "model.layers.1.mlp.gate" in experts.linears
    adapted = policy()
    add_adapters(adapted, LoraConfig(rank=4, alpha=8), seed=0)
    for model in (experts, adapted):
        require_gradients(model, Processes())
        assert all(master.grad is None for master in model.masters.values())
