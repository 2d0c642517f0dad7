"""Agreement of learner and sampler on tiny random models of many families.

python -m benchmarks.families [NAME …] [--schemes w4a16,w8a8] [--dtype bfloat16] [--json FILE]
python -m benchmarks.families --commands [NAME …]     what the commands do, `family_commands`

With `--commands` a FILE of `--json` is written after every family, and families that it already
has in this scheme and dtype are not run again. So a table of hours can be made in parts.

For each family and scheme vLLM starts on the exported codes, is audited, takes another version of
them, and samples. Three things are measured:

- the fraction of sampled tokens whose log-prob the learner reproduces to the last bit;
- over all masters' gradients of a policy-gradient loss, the cosine with and the relative error to
  transformers' gradients in float32 on the dequantized weights. That reference has no low-bit
  activations, so for schemes that have them the error is an upper bound;
- whether every master gets a gradient;
- the mean |Δ log p| of vLLM's operators and transformers' in float32, and its bound
  (`quant.model.operator_check`). A run of a family beyond the bound is refused.
"""

import argparse
import copy
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.family_commands import print_row, registered, table, through_commands
from benchmarks.random_policy import SIZES
from qarl.cli.options import json_file, write_json
from qarl.configs.schema.run import LayerRule, RolloutConfig
from qarl.embedded.recipe import RECIPES, ensure_recipe
from qarl.learner.batching import Batch, make_batch
from qarl.learner.logprobs import token_logprobs
from qarl.learner.mismatch import measure_mismatch
from qarl.mismatch.investigate import engine_of
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.model.operator_check import check_operators
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.report.record import record
from qarl.rollout.types import Group, Prompt, Sampling
from qarl.sync.audit import audit, require_agreement
from qarl.sync.publisher import Publisher

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_HEADS = {"head_dim": 32}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT = {
    **_MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_DELTA = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_SHORT_CONVOLUTION = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_ff_dim": 256,
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
}
_MAMBA_2 = {"mamba_n_heads": 32, "mamba_d_head": 8, "mamba_d_state": 64}
"""Heads such that vLLM's int4 kernel for CPUs has the first projection: a multiple of 32 rows."""
_MAMBA_LAYERS = {"layer_types": ["mamba", "attention", "mamba"]}
_POSITIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
    }
}
_PICTURES = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_SLIDING = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _HEADS),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "attention_bias": True,
        },
    ),
    "mistral": ("MistralConfig", {**_HEADS, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _HEADS),
    "qwen3-tied": ("Qwen3Config", {**_HEADS, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {**_HEADS, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            **_HEADS,
            **_SLIDING,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_HEADS,
            **_SLIDING,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "glm": ("GlmConfig", _HEADS),
    "glm4": ("Glm4Config", _HEADS),
    "exaone4": ("Exaone4Config", {**_SLIDING, "sliding_window_pattern": 2}),
    "ernie4.5": ("Ernie4_5Config", _HEADS),
    "cohere": (
        "CohereConfig",
        {"tie_word_embeddings": True, "logit_scale": 0.25, "use_qk_norm": True},
    ),
    "cohere2": (
        "Cohere2Config",
        {**_HEADS, **_SLIDING, "tie_word_embeddings": True, "logit_scale": 0.25},
    ),
    "smollm3": ("SmolLM3Config", {}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _SLIDING),
    "starcoder2": ("Starcoder2Config", {"use_bias": True}),
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", _HEADS),
    "arcee": ("ArceeConfig", _HEADS),
    "seed-oss": ("SeedOssConfig", _HEADS),
    "helium": ("HeliumConfig", _HEADS),
    "hunyuan": ("HunYuanDenseV1Config", _HEADS),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512},
    ),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "gptj": (
        "GPTJConfig",
        {
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "rotary_dim": 16,
        },
    ),
    "gpt-bigcode": (
        "GPTBigCodeConfig",
        {
            "n_embd": 128,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 512,
            "num_key_value_heads": 1,
        },
    ),
    "opt": ("OPTConfig", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "falcon": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    ),
    "persimmon": ("PersimmonConfig", {"num_key_value_heads": 4}),
    "minicpm3": ("MiniCPM3Config", {"num_key_value_heads": 4}),
    "apertus": ("ApertusConfig", _HEADS),
    "ministral": ("MinistralConfig", {**_HEADS, **_SLIDING}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 128}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_HEADS, **_MOE}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {**_HEADS, **_MOE, **_DELTA, "shared_expert_intermediate_size": 128},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", {**_HEADS, **_DELTA}),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**_HEADS, **_MOE, **_DELTA, "shared_expert_intermediate_size": 128},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {**_MOE, "intermediate_size": 128}),
    "flex-olmo": ("FlexOlmoConfig", {**_MOE, "intermediate_size": 128}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            **_HEADS,
            **_MOE,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        {**_MOE, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
    "dots1": (
        "Dots1Config",
        {
            **_HEADS,
            **_MOE,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        {**_HEADS, **_MOE, "moe_topk": 2, "moe_intermediate_size": 256},
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "attention_multiplier": 0.2,
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "shared_intermediate_size": 128,
            "attention_multiplier": 0.2,
        },
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {
            **_HEADS,
            **_MOE,
            **_SLIDING,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_HEADS,
            **_SLIDING,
            "num_kv_shared_layers": 1,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 128,
            "vocab_size_per_layer_input": 512,
        },
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {
            **_HEADS,
            **_SLIDING,
            "num_kv_shared_layers": 0,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 128,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **_HEADS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        {
            **_HEADS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rotary_dim": 16,
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", _LATENT),
    "deepseek-v3": ("DeepseekV3Config", _LATENT),
    "afmoe": (
        "AfmoeConfig",
        {
            **_HEADS,
            **_MOE,
            "num_dense_layers": 1,
            "score_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "route_norm": True,
            "route_scale": 1.0,
            "mup_enabled": False,
        },
    ),
    "cwm": ("CwmConfig", {**_HEADS, **_SLIDING}),
    "nanochat": ("NanoChatConfig", {}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {**_HEADS, **_SLIDING, "query_pre_attn_scalar": 32},
    ),
    "ministral3": ("Ministral3Config", _HEADS),
    "solar-open": (
        "SolarOpenConfig",
        {**_HEADS, **_MOE, "n_routed_experts": 8, "n_shared_experts": 1},
    ),
    "biogpt": ("BioGptConfig", {}),
    "bitnet": ("BitNetConfig", {}),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "doge": ("DogeConfig", {}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_HEADS,
            "tie_word_embeddings": True,
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 8,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_SHORT_CONVOLUTION,
            "block_dim": 128,
            "conv_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {
            **_SHORT_CONVOLUTION,
            **_MOE,
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        {**_HEADS, "mamba_d_ssm": 256, **_MAMBA_2},
    ),
    "granite-4-h": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA_LAYERS,
            **_MAMBA_2,
            "shared_intermediate_size": 256,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
    ),
    "granite-4-h-moe": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA_LAYERS,
            **_MAMBA_2,
            "shared_intermediate_size": 128,
            "intermediate_size": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "bamba": ("BambaConfig", {**_MAMBA_2, "attn_layer_indices": [1]}),
    "nemotron-h": (
        "NemotronHConfig",
        {
            **_HEADS,
            "hybrid_override_pattern": "M-*",
            "time_step_min": 1e-30,
            "mamba_num_heads": 32,
            "mamba_head_dim": 8,
            "ssm_state_size": 64,
            "n_groups": 2,
        },
    ),
    "nemotron-h-moe": (
        "NemotronHConfig",
        {
            **_HEADS,
            "hybrid_override_pattern": "ME*",
            "time_step_min": 1e-30,
            "mamba_num_heads": 32,
            "mamba_head_dim": 8,
            "ssm_state_size": 64,
            "n_groups": 2,
            "n_routed_experts": 8,
            "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 128,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "n_mamba_heads": 32,
            "mamba_d_state": 64,
            "mamba_ngroups": 1,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "time_step_min": 1e-30,
        },
    ),
    "qwen3.5-vl": ("Qwen3_5Config", {"text_config": {**_HEADS, **_DELTA}, **_PICTURES}),
    "qwen3.5-moe-vl": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {
                **_HEADS,
                **_MOE,
                **_DELTA,
                "shared_expert_intermediate_size": 128,
            },
            **_PICTURES,
        },
    ),
    "qwen3-vl": ("Qwen3VLConfig", {"text_config": {**_HEADS, **_POSITIONS}, **_PICTURES}),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": _POSITIONS,
            **_PICTURES,
            "vision_config": {
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": 128,
                "fullatt_block_indexes": [0],
            },
        },
    ),
    "mistral3-vl": (
        "Mistral3Config",
        {
            "text_config": {**_HEADS, "model_type": "mistral"},
            "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 32},
            "image_token_index": 500,
        },
    ),
    "smolvlm": (
        "SmolVLMConfig",
        {
            "text_config": {**_HEADS, "model_type": "llama"},
            "vision_config": _TOWER,
            "image_token_id": 500,
            "scale_factor": 2,
        },
    ),
    "gemma3-vl": (
        "Gemma3Config",
        {
            "text_config": {**_HEADS, **_SLIDING, "query_pre_attn_scalar": 32},
            "vision_config": _TOWER,
            "mm_tokens_per_image": 4,
        },
    ),
    "olmo-hybrid": ("OlmoHybridConfig", _DELTA),
    "kimi-linear": (
        "KimiLinearConfig",
        {
            **_LATENT,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
                "num_heads": 2,
                "head_dim": 64,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", _LATENT),
    "glm-5": ("GlmMoeDsaConfig", _LATENT),
    "deepseek-v3.2": ("DeepseekV32Config", _LATENT),
    "llama4": (
        "Llama4TextConfig",
        {
            **_HEADS,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1,
        },
    ),
    "jamba": ("JambaConfig", {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1}),
    "mamba": ("MambaConfig", {}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 64}),
}
"""Name → transformers' configuration class, and the differences from `SIZES` and `_TOKENS`."""

RULES = {"gpt-oss": ("*.experts.*=bf16",)}
"""Name → layer rules beside quantizing schemes: layers for which vLLM has no low-bit product."""

_PEAK = 3.0
"""Standard deviation of an untrained model's logits.

Flat distributions would hide the effect of mismatch on peaks.
"""


def write_model(name: str, folder: Path, seed: int = 0) -> None:
    """Write a random model of the family, with every parameter drawn, and a generic tokenizer."""
    kind, changes = FAMILIES.get(name, (name, {}))
    untrained = dataclasses.replace(
        RECIPES["tiny-qwen3"], warm_start_steps=0, tie_word_embeddings=False, seed=0
    )
    shutil.copytree(ensure_recipe("random-qwen3", untrained), folder, dirs_exist_ok=True)
    for file in (
        *folder.glob("*.safetensors*"),
        folder / "config.json",
        folder / "generation_config.json",
    ):
        file.unlink(missing_ok=True)
    text = {**SIZES, **_TOKENS}
    make: Any = AutoModelForCausalLM
    if "text_config" in changes:
        make = AutoModelForImageTextToText
        changes = {**changes, "text_config": {**text, **changes["text_config"]}}
        text = {"tie_word_embeddings": text["tie_word_embeddings"]}
    config = getattr(transformers, kind)(**{**text, **changes})
    torch.manual_seed(seed)
    model = make.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
        for key, buffer in model.named_buffers():
            if "bias" in key and buffer.is_floating_point():
                buffer.add_(0.1 * torch.randn_like(buffer))
        tokens = torch.arange(3, 67)[None]
        spread = float(model(input_ids=tokens).logits.float().std())
        model.get_output_embeddings().weight.mul_(_PEAK / spread)
    model.save_pretrained(folder)


def measure(
    name: str,
    scheme: str,
    dtype: str,
    samples: int,
    tokens: int,
) -> dict[str, Any]:
    """Measure one family in one scheme and return its row."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(name, folder)
        masters = load_masters(folder, torch.float32)
        reference = copy.deepcopy(masters)
        context = LayerContext(COMPUTE_DTYPES[dtype], "auto")
        rules = [LayerRule.model_validate(rule) for rule in RULES.get(name, ()) if scheme != "bf16"]
        model = LowBitModel(masters, get_scheme(scheme), context, "engine", rules)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(16, 500, (samples, 16), generator=generator).tolist()
        prompts = [Prompt(str(n), "", tuple(row)) for n, row in enumerate(drawn)]
        operators = check_operators(model, drawn)
        assert operators is not None
        rollout = RolloutConfig(max_prompt_tokens=16, max_new_tokens=tokens)
        with engine_of(model, folder, rollout, dtype) as engine:
            _publish_another(model, engine, drawn)
            completions = engine.generate(prompts, Sampling(1, tokens, seed=0))
            pairs = zip(prompts, completions, strict=True)
            groups = [Group(prompt, tuple(answers), (1.0,)) for prompt, answers in pairs]
            batch = make_batch(groups, pad_token=0)
            model.multiply_with(engine.shared_layers())
            with torch.no_grad():
                shared = _scores(model, batch)
            model.multiply_with(None)
        with torch.no_grad():
            scores = _scores(model, batch)
        by_learner = measure_mismatch(scores, batch.sampler_logprobs, batch.response_mask)
        by_engine = measure_mismatch(shared, batch.sampler_logprobs, batch.response_mask)
        gradients = _gradients(model, batch)
        trained = [n for n, master in model.masters.items() if master.requires_grad]
        missing = [n for n in trained if n not in gradients or not gradients[n].any()]
        expected, plain = _reference(model, reference, batch)
        cosine, error = _compare(gradients, expected)
        return {
            "family": name,
            "scheme": scheme,
            "dtype": dtype,
            "equal": by_engine.equal,
            "equal_own": by_learner.equal,
            "mean_abs": by_engine.mean_abs,
            "reference": plain,
            "operators": operators.difference,
            "operators_bound": operators.bound,
            "cosine": cosine,
            "relative": error,
            "unreached": missing[:4],
        }


def _publish_another(model: LowBitModel, engine: Any, sequences: list[list[int]]) -> None:
    """Audit the engine, move all masters a little, and publish them."""
    require_agreement(audit(model.layers(), engine.layers(), same_kernels=True))
    with torch.no_grad():
        for master in (master for master in model.masters.values() if master.requires_grad):
            master.add_(0.1 * master.abs().mean() * torch.randn_like(master))
    model.refresh()
    Publisher(model, engine, sequences, bound=float("inf"), canary_every=1).publish(1)


def _scores(model: Any, batch: Batch) -> torch.Tensor:
    return token_logprobs(
        model, batch.tokens, batch.response_mask, packed=batch.packed(), entropy=False
    )[0]


def _weights(batch: Batch) -> torch.Tensor:
    return (
        torch.linspace(-1, 1, batch.response_mask.numel()).view_as(batch.response_mask)
        * batch.response_mask
    )


def _gradients(model: LowBitModel, batch: Batch) -> dict[str, torch.Tensor]:
    (_scores(model, batch) * _weights(batch)).sum().backward()
    return {n: p.grad for n, p in model.masters.items() if p.grad is not None}


def _reference(
    model: LowBitModel, reference: Any, batch: Batch
) -> tuple[dict[str, torch.Tensor], float]:
    """Return transformers' float32 gradients on the dequantized weights.

    The second value is the mean |Δ log p| between this reference and the sampler.
    """
    # dequantized weights by the identity of their master
    values = {id(layer.master): layer.weight_used() for layer in model.linears.values()}
    for experts in model.experts.values():
        stacks = experts.stacks_used(torch.float32)
        if experts.shape.layout.transposed:
            stacks = tuple(stack.transpose(1, 2) for stack in stacks)
        values |= dict(zip(map(id, experts.masters), stacks, strict=True))
    names = {name: values.get(id(parameter)) for name, parameter in model.loaded.items()}
    parameters = dict(reference.named_parameters())
    with torch.no_grad():
        for name, value in names.items():
            parameters[name].copy_(model.loaded[name].to(model.dtype) if value is None else value)
    logits = reference(input_ids=batch.tokens, use_cache=False).logits[:, :-1].float()
    next_tokens = batch.tokens[:, 1:, None]
    logp = logits.log_softmax(-1).gather(-1, next_tokens)[..., 0]
    (logp * _weights(batch)).sum().backward()
    off = measure_mismatch(
        logp.detach() * batch.response_mask, batch.sampler_logprobs, batch.response_mask
    ).mean_abs
    gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return gradients, off


def _compare(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
) -> tuple[float, float]:
    names = [name for name in theirs if name in ours]
    a = torch.cat([ours[name].double().flatten() for name in names])
    b = torch.cat([theirs[name].double().flatten() for name in names])
    cosine = a @ b / (a.norm() * b.norm())
    relative_error = (a - b).norm() / b.norm()
    return float(cosine), float(relative_error)


def _through_commands(
    names: list[str], scheme: str, dtype: str, file: str | None
) -> list[dict[str, Any]]:
    """Print and return a row of each family, or of every architecture that vLLM registers.

    file: record that is written after each row, and whose rows are not measured again.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # forks inherit no threads
    rows = _rows_of(file, scheme, dtype)
    classes = registered()
    others = sorted({*classes.values()} - {kind for kind, _ in FAMILIES.values()} - {""})
    done = {row["family"] for row in rows}
    for name in names or [*FAMILIES, *others]:
        if name in done:
            continue
        row: dict[str, Any] = {"family": name, "scheme": scheme, "dtype": dtype}
        with tempfile.TemporaryDirectory() as folder:
            try:
                write_model(name, Path(folder))
            # a class has settings that belong together
            except Exception as error:
                row |= {"outcome": "not made", "reason": f"{type(error).__name__}: {error}"}
            else:
                rules = RULES.get(name, ()) if scheme != "bf16" else ()
                row |= through_commands(name, Path(folder), scheme, dtype, rules)
        rows.append(row)
        print_row(row)
        _write(file, rows)
    if not names:
        rows += [
            {
                "family": name,
                "scheme": scheme,
                "dtype": dtype,
                "outcome": "refused",
                "reason": "transformers has no such class",
            }
            for name, kind in classes.items()
            if not kind and name not in done
        ]
        _write(file, rows)
    table(rows)
    return rows


def _rows_of(file: str | None, scheme: str, dtype: str) -> list[dict[str, Any]]:
    """Return the rows of a record that are in this scheme and dtype; [] if there is none."""
    if file is None or not Path(file).is_file():
        return []
    rows = json.loads(Path(file).read_text(encoding="utf-8"))["data"]
    return [row for row in rows if (row["scheme"], row["dtype"]) == (scheme, dtype)]


def _write(file: str | None, rows: list[dict[str, Any]]) -> None:
    """Write the record of these rows, unless `file` is None."""
    write_json(file, record(sys.argv[1:], rows, "python -m benchmarks.families"))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--schemes", default="bf16,w4a16,w8a8")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(COMPUTE_DTYPES))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the rows as a record")
    parser.add_argument(
        "--commands",
        action="store_true",
        help="go through schemes, check and train instead, with the first of --schemes; without"
        " NAME every text architecture that vLLM registers",
    )
    parser.add_argument("--trace", action="store_true", help="print tracebacks of refusals")
    options = parser.parse_args()
    if options.commands:
        scheme = options.schemes.split(",")[0]
        _through_commands(options.names, scheme, options.dtype, options.json)
        return 0
    rows = []
    for name in options.names or FAMILIES:
        for scheme in options.schemes.split(","):
            try:
                row = measure(name, scheme, options.dtype, options.samples, options.tokens)
                beyond = "beyond the bound" if row["operators"] > row["operators_bound"] else ""
                text = (
                    f"equal {row['equal']:.3f} own {row['equal_own']:.3f} ref"
                    f" {row['reference']:.3f} fp32 {row['operators']:.1e} {beyond} cos"
                    f" {row['cosine']:.4f} rel {row['relative']:.3f} {row['unreached'] or ''}"
                )
            except Exception as error:
                row = {
                    "family": name,
                    "scheme": scheme,
                    "refused": f"{type(error).__name__}: {error}",
                }
                text = row["refused"][:300]
                if options.trace:
                    traceback.print_exc()
            rows.append(row)
            print(f"{name:20} {scheme:8} {text}", flush=True)
            if "refused" in row:
                break
    _write(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
