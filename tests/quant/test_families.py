"""A model family is one row: with it, an architecture nobody here has heard of is planned, streamed and computed."""

import copy

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl.configs.schema.run import LayerRule
from qarl.quant.checkpoint.families import FAMILIES, ExpertLayout, Family, family_of
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.operators.decoder import why_not
from qarl.quant.schemes import SchemeError, get_scheme
from tests.support.moe_models import CONFIGS, random_moe

ROW = Family(
    ExpertLayout("w1", "w3", "w2"), renamed=((".mlp.", ".ffn."),), engine_operators=True, quantizes_router=False
)


class OtherConfig(Qwen3MoeConfig):
    """Qwen3-MoE by another name."""

    model_type = "other_moe"


@pytest.fixture
def known() -> Qwen3MoeForCausalLM:
    model = random_moe(CONFIGS["qwen3_moe"])
    assert isinstance(model, Qwen3MoeForCausalLM)
    return model


def renamed(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    other = copy.deepcopy(model)
    settings = {k: v for k, v in model.config.to_dict().items() if k != "model_type"}
    config: PreTrainedConfig = OtherConfig(**settings)
    config._attn_implementation = "eager"
    other.config = other.model.config = config  # type: ignore[assignment]
    return other


def test_a_family_is_one_row(known: Qwen3MoeForCausalLM, monkeypatch: pytest.MonkeyPatch):
    """Contract: without its row the model is refused, naming it; with it, layers, stream, kernels' names and engine
    operators follow the row, and codes and logits are those of the architecture it copies, bit for bit. Blind spot:
    vLLM's own reading of such a checkpoint (tests/engine has that for every family listed)."""
    other, context = renamed(known), LayerContext(torch.bfloat16, "reference")
    assert "other_moe" in why_not(other)
    with pytest.raises(SchemeError, match=r"model type 'other_moe', whose checkpoint layout is not known here"):
        LowBitModel(copy.deepcopy(other), get_scheme("w8a8"), context)

    monkeypatch.setitem(FAMILIES, "other_moe", ROW)
    rules = [LayerRule(match="*.ffn.gate", scheme="w8a8")]
    with pytest.raises(SchemeError, match=r"router of a 'other_moe' model unquantized"):
        LowBitModel(copy.deepcopy(other), get_scheme("w8a8"), context, rules=rules)
    ours = LowBitModel(other, get_scheme("w8a8"), context)
    theirs = LowBitModel(known, get_scheme("w8a8"), LayerContext(torch.bfloat16, "reference"))
    assert ours.operators == theirs.operators == "engine"
    assert "model.layers.1.ffn.experts.0.w2" in ours.plan.schemes
    words = {".mlp.": ".ffn.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for a, b in zip(ours.low_bit_tensors(), theirs.low_bit_tensors(), strict=True):
        name = b.name
        for theirs_word, word in words.items() if ".experts." in name else [(".mlp.", ".ffn.")]:
            name = name.replace(theirs_word, word)
        assert a.name == name and torch.equal(a.tensor.view(torch.uint8), b.tensor.view(torch.uint8)), name
    tokens = torch.arange(24).view(2, 12)
    everywhere = torch.ones(2, 12, dtype=torch.bool)
    assert torch.equal(ours.logits(tokens, everywhere), theirs.logits(tokens, everywhere))


def test_stacked_layers_of_a_family_need_one_scheme(known: Qwen3MoeForCausalLM, monkeypatch: pytest.MonkeyPatch):
    """What the engine stacks is read from the row too: where it stacks nothing, q may differ from k and v."""
    rules = [LayerRule(match="*.q_proj", scheme="bf16")]
    with pytest.raises(SchemeError, match=r"multiplies 'model\.layers\.0\.self_attn\.qkv_proj' as one"):
        LowBitModel(copy.deepcopy(known), get_scheme("w8a8"), LayerContext(torch.bfloat16, "reference"), rules=rules)
    monkeypatch.setitem(FAMILIES, "qwen3_moe", Family(ExpertLayout(), stacked={}))
    model = LowBitModel(known, get_scheme("w8a8"), LayerContext(torch.bfloat16, "reference"), rules=rules)
    assert model.plan.scheme("model.layers.0.self_attn.q_proj").name == "bf16"
    assert model.operators == "transformers"


def test_a_type_without_a_row_is_a_dense_model():
    assert family_of("nobody") == Family() and not family_of("nobody").engine_operators
