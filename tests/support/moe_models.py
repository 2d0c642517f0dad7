"""Small random mixtures of experts of every layout known to quant/checkpoint/families.py, for the tests."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
HEADS: dict[str, Any] = {"head_dim": 64}
ONE_GROUP: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 64,
}  # fmt: skip
"""512 + 64 columns are the only width of vLLM's latent attention on CPUs."""
CORRECTED: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Read by vLLM only; transformers knows no other routing for these models."""

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES, **ROUTED, num_experts=3, shared_expert_intermediate_size=256, mlp_only_layers=[0]
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **ROUTED, **HEADS, num_experts=5, mlp_only_layers=[0]),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v2": transformers.DeepseekV2Config(**SIZES, **ROUTED, **ONE_GROUP, **LATENT, topk_method="greedy"),
    "deepseek_v3": transformers.DeepseekV3Config(**SIZES, **ROUTED, **ONE_GROUP, **LATENT, **HEADS, **CORRECTED),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2),
    "glm4_moe": transformers.Glm4MoeConfig(**SIZES, **ROUTED, **ONE_GROUP, **HEADS, use_qk_norm=True),
    "dots1": transformers.Dots1Config(**SIZES, **ROUTED, **ONE_GROUP, **HEADS),
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=128, moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "granitemoe": transformers.GraniteMoeConfig(
        **SIZES, num_local_experts=3, num_experts_per_tok=2, attention_multiplier=0.2
    ),
}  # fmt: skip


def random_moe(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Every parameter and persistent buffer drawn anew: biases that are zero at initialization would hide mistakes."""
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    kept = model.state_dict()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in kept:
                noise = torch.randn(tensor.shape, generator=generator)
                one = 1.0 if tensor.ndim == 1 and name.endswith("norm.weight") else 0.0
                tensor.copy_(one + noise * (0.1 if tensor.ndim == 1 else 1.5 * tensor.shape[-1] ** -0.5))
    return model.eval()


def with_tokenizer(kind: str, policy: Path, folder: Path) -> Path:
    """Write `random_moe` of that kind with the tokenizer of an embedded policy, which engines want."""
    random_moe(CONFIGS[kind]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, folder / name)
    return folder
