"""Tests of the gradient gate.

A gradient that is cut while values stay exact ends the run; each way in which this has happened is
planted in a model.
"""

import random
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
from tests.support.learners import (
    batch_of,
    experts_policy,
    logprob_gradients,
    policy,
    random_model,
)
from tests.support.models import low_bit, same_stream, stream_bytes
from tests.support.tensors import as_bytes

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


def with_zeros(names: list[str], scheme: str = "w8a8", negative: str = "") -> Any:
    """Return a low-bit model whose masters of these names are zero; `negative` has minus zeros."""
    model = random_model()
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).fill_(-0.0 if name == negative else 0.0)
    return low_bit(model, scheme, operators="engine")


@pytest.mark.parametrize("seed", range(6))
def test_gradients_that_zero_weights_make_zero_are_not_taken_for_cut_ones(seed: int):
    """Contract: masters that are zero pass, although all that is behind them gets a zero gradient;
    masters and codes keep their bits, minus zeros too. Drawn: which matrices of which layer are
    zero, and the scheme. Seed 0 has the identity block of LLaMA-Pro: o_proj and down_proj.
    """
    draw = random.Random(seed)
    kinds = ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    kinds += ["self_attn.o_proj", "mlp.down_proj", "input_layernorm"]
    chosen = kinds[4:6] if seed == 0 else draw.sample(kinds, draw.randint(1, 3))
    names = [f"model.layers.{draw.randrange(2)}.{kind}.weight" for kind in chosen]
    model = with_zeros(
        names,
        draw.choice(["w8a8", "w4a16", "fp8", "bf16"]),
        names[0],
    )
    _, gradients = logprob_gradients(model, batch_of())
    if seed == 0:
        assert any(not gradient.any() for gradient in gradients.values())
    before = {name: as_bytes(master.detach()).clone() for name, master in model.masters.items()}
    codes = stream_bytes(model)
    require_gradients(model, Processes())
    assert all(torch.equal(before[n], as_bytes(m.detach())) for n, m in model.masters.items())
    assert same_stream(model, codes)


@pytest.mark.parametrize("plant", TRAPS, ids=lambda plant: plant.__name__)
def test_a_cut_gradient_beside_zero_weights_is_named_alone(plant: Callable[[Any], None]):
    """Contract: the masters that zero weights leave without gradient are not in the message."""
    model = with_zeros([f"model.layers.1.{kind}.weight" for kind in ("mlp.up_proj",)])
    plant(model.graph.module)
    with pytest.raises(GraphError, match=f"no gradient reaches {re.escape(TRAPS[plant])}") as cut:
        require_gradients(model, Processes())
    assert "layers.1" not in str(cut.value)
