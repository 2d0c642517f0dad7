"""Small random mixtures of experts of every layout that quant/checkpoint/families.py knows."""

import functools
import operator
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.tensors import seeded

PARTS: dict[str, dict[str, Any]] = {
    "sizes": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    },
    "routed": {"num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "heads": {"head_dim": 64},
    "one group": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "latent": {
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "qk_rope_head_dim": 64,
    },
    "corrected": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Fields that several families share. vLLM's latent attention on CPUs has only 512 + 64 columns.

Only vLLM reads the fields of corrected routing; transformers knows no other routing for these
models.
"""
SIZES = PARTS["sizes"]
KINDS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        ["routed"],
        {"num_experts": 3, "shared_expert_intermediate_size": 256, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        ["routed", "heads"],
        {"num_experts": 5, "mlp_only_layers": [0]},
    ),
    "mixtral": (
        "MixtralConfig",
        [],
        {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        ["routed", "one group", "latent"],
        {"topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        ["routed", "one group", "latent", "heads", "corrected"],
        {},
    ),
    "olmoe": ("OlmoeConfig", [], {"num_experts": 3, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", ["routed", "one group", "heads"], {"use_qk_norm": True}),
    "dots1": ("Dots1Config", ["routed", "one group", "heads"], {}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        [],
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 128,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        [],
        {"num_local_experts": 3, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    ),
}
"""Family → transformers' configuration class, the `PARTS` that it has, and its own fields."""
CONFIGS: dict[str, PreTrainedConfig] = {
    kind: getattr(transformers, name)(
        **functools.reduce(operator.or_, (PARTS[part] for part in parts), SIZES | own)
    )
    for kind, (name, parts, own) in KINDS.items()
}


def random_moe(
    config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Draw every parameter and persistent buffer, because biases that are zero at initialization
    would hide mistakes.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = seeded(seed)
    kept = model.state_dict()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in kept:
                noise = torch.randn(tensor.shape, generator=generator)
                one = 1.0 if tensor.ndim == 1 and name.endswith("norm.weight") else 0.0
                tensor.copy_(
                    one + noise * (0.1 if tensor.ndim == 1 else 1.5 * tensor.shape[-1] ** -0.5)
                )
    return model.eval()


def with_tokenizer(kind: str, policy: Path, folder: Path) -> Path:
    """Write `random_moe` of that kind with the tokenizer of an embedded policy,
    which engines need.
    """
    random_moe(CONFIGS[kind]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, folder / name)
    return folder
