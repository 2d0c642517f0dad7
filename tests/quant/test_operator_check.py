"""Tests of the comparison of vLLM's operators with transformers', with faults that it is for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from qarl.configs.errors import GraphError
from qarl.configs.load import config_from_tree
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.processes import Processes
from qarl.quant.model import operator_check
from qarl.quant.model.add_lora import add_adapters
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.operator_check import TIMES_ROUNDING, OperatorCheck, check_operators
from qarl.run.session import connected
from qarl.sync.audit import AuditError, require_right_operators
from tests.support.models import SIZES, cast, low_bit, qwen3, randomize, some_tokens
from tests.support.moe_models import CONFIGS, random_moe

ROWS = some_tokens(3, 40).tolist()


def gemma2() -> PreTrainedModel:
    """Return a model that scales embeddings, caps scores and logits, and has windows."""
    config = Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=64)
    return randomize(Gemma2ForCausalLM(config))


def of(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16) -> LowBitModel:
    return low_bit(model, "w8a8", dtype, kernel="auto", operators="engine")


def checked(model: LowBitModel) -> OperatorCheck:
    check = check_operators(model, ROWS)
    assert check is not None
    assert not check.unknown
    return check


@pytest.mark.parametrize(
    "make",
    [
        qwen3,
        lambda: qwen3(tied=False),
        lambda: cast(qwen3(), torch.bfloat16),
        gemma2,
        lambda: cast(gemma2(), torch.bfloat16),
        lambda: random_moe(CONFIGS["qwen3_moe"]),
        lambda: random_moe(CONFIGS["glm4_moe"]),
    ],
    ids=["tied", "untied", "16-bit masters", "gemma2", "gemma2 in 16 bits", "mixture", "glm4"],
)
def test_right_operators_differ_by_what_rounding_explains(make: Callable[[], PreTrainedModel]):
    """Contract: right models are no more than 4 times the measured effect of rounding apart, and
    the bound is 30 times it.
    """
    check = checked(of(make()))
    assert 0.0 < check.difference < 4 * check.bound / TIMES_ROUNDING
    assert check.bound < 1e-3
    require_right_operators(check)


def test_the_comparison_leaves_the_model_as_it_was():
    model = of(qwen3())
    before = {name: master.clone() for name, master in model.masters.items()}
    tokens = torch.tensor(ROWS)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        hidden = model.hidden(tokens, everywhere)
        checked(model)
        assert torch.equal(model.hidden(tokens, everywhere), hidden)
    assert all(torch.equal(model.masters[name], value) for name, value in before.items())


def test_adapters_are_part_of_both_models():
    model = of(qwen3())
    add_adapters(model, LoraConfig(rank=4), 0)
    with torch.no_grad():
        for master in model.masters.values():
            master.normal_(std=0.1)
    model.refresh()
    assert not checked(model).wrong


def test_transformers_operators_are_not_compared_with_themselves():
    model = low_bit(qwen3(), "w8a8", operators="transformers")
    assert check_operators(model, ROWS) is None


def rotate_heads_as_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the rotary operator queries [N, heads, size], as vLLM's latent attention and LFM2 do."""
    repaired: Any = RotaryEmbedding.forward_cpu
    rotate = getattr(repaired, "__wrapped__", repaired)  # without `rotate_heads`, if it was called

    def stacked(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        parts: Any = (t.clone().view(len(t), -1, self.head_size) for t in (query, key))
        rotated: Any = rotate(self, positions, *parts)
        return tuple(t.flatten(1) for t in rotated)

    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", stacked)


def take_another_theta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rotary embedding's base a hundredth larger."""
    frequencies = RotaryEmbedding._compute_inv_freq
    monkeypatch.setattr(
        RotaryEmbedding,
        "_compute_inv_freq",
        lambda self, base: frequencies(self, 1.01 * base),
    )


def take_another_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give norms an epsilon of 1e-5 instead of 1e-6."""
    make = RMSNorm.__init__

    def made(
        self: Any,
        size: int,
        eps: float = 1e-6,
        *rest: Any,
        **named: Any,
    ) -> None:
        make(self, size, 10 * eps, *rest, **named)

    monkeypatch.setattr(RMSNorm, "__init__", made)


FAULTS = [rotate_heads_as_tokens, take_another_theta, take_another_epsilon]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_learner_and_engine_alike_is_refused_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plant: Callable[..., None]
):
    """Contract: faults that no comparison of learner and engine can show refuse a run, with the
    layer in which they begin, the difference and its bound.
    """
    plant(monkeypatch)
    model = of(qwen3())
    config = config_from_tree({"scheme": "w8a8"})
    start = tmp_path / "start"
    with (
        pytest.raises(AuditError) as error,
        connected(model, tmp_path, start, config, ROWS, Processes()),
    ):
        pass
    numbers = r"[\d.e-]+"
    words = (
        rf"differ by {numbers} nats a token in float32, of \d+ tokens, where rounding explains"
        rf" {numbers}; they part in decoder layer 0, whose output differs by {numbers} of its size"
    )
    assert re.search(words, str(error.value))
    assert "report this one" in str(error.value)
    assert not start.exists()
    check = checked(model)
    assert check.difference > 3 * check.bound


def test_the_layer_where_two_models_part_is_named(monkeypatch: pytest.MonkeyPatch):
    """Check a fault in the last of three layers: a gate that is left out."""
    trace = operator_check._engine_trace

    def spoilt(graph: Any, *rest: Any) -> Any:
        gate = graph.module.get_submodule("model.layers.2.mlp.act_fn")
        gate._forward_method = lambda x: x.chunk(2, dim=-1)[1]
        return trace(graph, *rest)

    monkeypatch.setattr(operator_check, "_engine_trace", spoilt)
    assert "they part in decoder layer 2" in str(checked(of(qwen3(num_hidden_layers=3))))


def test_a_model_that_vllm_does_not_run_in_float32_is_said_not_to_be_compared(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(self: Any, *unused: Any) -> None:
        raise NotImplementedError("this kernel has bfloat16 alone")

    model = of(qwen3())
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", refuse)
    check = check_operators(model, ROWS)
    assert check is not None
    assert not check.wrong
    assert "does not run in float32 (NotImplementedError: this kernel has bfloat16" in str(check)


def test_another_error_of_the_comparison_is_raised_with_its_type_and_place(
    monkeypatch: pytest.MonkeyPatch,
):
    """Contract: an error that names no dtype is no property of the model, and not passed over."""

    def fail(self: Any, *unused: Any) -> None:
        raise AssertionError

    model = of(qwen3())
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", fail)
    words = r"in float32: AssertionError at quant/test_operator_check.py:\d+, 'raise"
    with pytest.raises(GraphError, match=words):
        check_operators(model, ROWS)


def test_an_attribute_error_while_the_graph_is_built_keeps_its_words(
    monkeypatch: pytest.MonkeyPatch,
):
    model = of(qwen3())
    model._graphs.clear()
    monkeypatch.setattr(model, "_layers", None)
    with pytest.raises(RuntimeError, match="AttributeError: 'NoneType' object has no attribute"):
        _ = model.graph
