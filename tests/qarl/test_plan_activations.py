"""The plan's activations against what a forward through the engine's model keeps for its backward, counted.

Blind spots: counted on a CPU, of small layers; tests/qarl/test_plan_peak.py has a GPU's, and what lives only while a
layer computes.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.configs.load import config_file, load_config
from qarl.planning.memory import count_memory
from qarl.planning.shapes import shapes_of
from qarl.quant.graph.packing import Sequences
from tests.support.models import low_bit

LENGTHS, LAYERS, HIDDEN = (60, 70, 62), 3, 256
TOKENS = sum(LENGTHS)
DENSE = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": HIDDEN, "intermediate_size": 768, "head_dim": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    **DENSE, "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_activations_are_those_a_forward_keeps(config: dict[str, Any], scheme: str):
    """Contract: within 2 %, without and with checkpointing. With checkpointing the plan counts one layer's more, which
    the backward computes again, and the first layer's input as the others': a branch and a residual."""
    whole, checkpointed = (kept(config, scheme, checkpointing) for checkpointing in (False, True))
    column = TOKENS * HIDDEN * 2
    a_layer = (whole - 2 * column) / LAYERS  # without what the last norm keeps, and its output
    planned = [planned_activations(config, scheme, checkpointing, "cpu") for checkpointing in (False, True)]
    assert planned == [pytest.approx(whole, rel=0.02), pytest.approx(checkpointed + column + a_layer, rel=0.02)]


def kept(config: dict[str, Any], scheme: str, checkpointing: bool) -> int:
    """Bytes of the storages with a row a token that autograd holds after a forward in bfloat16, and of its result."""
    torch.manual_seed(0)
    masters = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    model = low_bit(masters, scheme, kernel="auto", operators="engine")
    model.checkpoint_layers(checkpointing)
    held: dict[int, torch.UntypedStorage] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > 1 and len(tensor) == TOKENS:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.arange(TOKENS) % config["vocab_size"]
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        hold(model.graph.hidden(tokens, Sequences.apart(LENGTHS)))
    return sum(storage.nbytes() for storage in held.values())


def planned_activations(config: dict[str, Any], scheme: str, checkpointing: bool, device: str) -> int:
    settings = {
        "scheme": scheme, "learner.micro_batch_tokens": str(TOKENS), "rollout.max_prompt_tokens": "64",
        "rollout.max_new_tokens": "64", "learner.gradient_checkpointing": str(checkpointing).lower(),
        "rollout.kv_cache_gib": "1",
    }  # fmt: skip
    run = load_config(config_file("tiny-qwen3"), settings)
    return count_memory(shapes_of(config, "model"), run, device, 1).of("activations")
