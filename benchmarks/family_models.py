"""Tiny random models of many families, for `benchmarks.families`.

A family is a configuration class of transformers with sizes of `benchmarks.random_policy`. Fields
beside these are those of released checkpoints that vLLM reads, also such that transformers' class
does not know.
"""

import dataclasses
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from benchmarks.random_policy import SIZES
from qarl.embedded.recipe import RECIPES, ensure_recipe

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_HEADS = {"head_dim": 32}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENT = {
    **_MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
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
_QWEN_4 = {
    **_HEADS,
    **_MOE,
    **_DELTA,
    "shared_expert_intermediate_size": 128,
    "hc_lowrank": 16,
    "output_gate_type": "silu",
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_SHORT_CONVOLUTION = {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_ff_dim": 256,
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
}
_MAMBA_2 = {"mamba_n_heads": 32, "mamba_d_head": 8, "mamba_d_state": 64}
"""Heads such that vLLM's int4 kernel for CPUs has the first projection: a multiple of 32 rows."""
_NEMOTRON_H = {
    **_HEADS,
    "hybrid_override_pattern": "M-*",
    "time_step_min": 1e-30,
    "mamba_num_heads": 32,
    "mamba_head_dim": 8,
    "ssm_state_size": 64,
    "n_groups": 2,
}
_NEMOTRON_H_MOE = {
    **_NEMOTRON_H,
    "hybrid_override_pattern": "ME*",
    "n_routed_experts": 8,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "routed_scaling_factor": 2.5,
}
_MAMBA_LAYERS = {"layer_types": ["mamba", "attention", "mamba"]}
_POSITIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
    }
}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
}
_PICTURES = {
    "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
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

_TOWER_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_hidden_size", "vision_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 2),
    **dict.fromkeys(("dim_head", "head_dim", "base_channels", "downsample_hidden_size"), 32),
    **dict.fromkeys(("out_hidden_size", "output_dim", "text_hidden_size"), 128),
    **dict.fromkeys(("projection_dim", "projector_hidden_size"), 128),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 128),
    **dict.fromkeys(("alignment_intermediate_size", "projection_intermediate_size"), 128),
    "encoder_attention_heads": 2,
    "cross_attention_frequency": 1,
    "num_position_embeddings": 64,
    "insert_layer_id": 0,
    "num_filters": 4,
    "mlp_ratio": 2.0,
    "image_size": 56,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
"""Field of a tower's configuration, or of what is between tower and language model → size."""
_PROCESSORS = {
    "Emu3Config": {"image_processor_type": "Emu3ImageProcessor"},
    "HunYuanVLConfig": {"image_processor_type": "HunYuanVLImageProcessor"},
    "VibeVoiceAsrConfig": {"feature_extractor_type": "VibeVoiceAcousticTokenizerFeatureExtractor"},
}
"""Configuration whose processor vLLM reads from the model's folder → preprocessor_config.json."""
_TOKENS_OF = {
    "Emu3Config": {
        "image_token": "A",
        "boi_token": "B",
        "eoi_token": "C",
        "image_wrapper_token": "D",
        "eof_token": "E",
    }
}
"""Configuration → special tokens that the processor's class asks of the tokenizer, some of its own.
"""
_DERIVED = ("layer_types", "transformers_version")
"""Fields that are made from sizes."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_LLAMA = {**_HEADS, "model_type": "llama"}

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
    "deepseek-v2": ("DeepseekV2Config", {**_LATENT, "n_group": 1, "topk_group": 1}),
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
    "nemotron-h": ("NemotronHConfig", _NEMOTRON_H),
    "nemotron-h-moe": ("NemotronHConfig", _NEMOTRON_H_MOE),
    "nemotron-h-latent": ("NemotronHConfig", {**_NEMOTRON_H_MOE, "moe_latent_size": 64}),
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
            "vision_config": {**_QWEN_TOWER, "fullatt_block_indexes": [0]},
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
    "glm4-moe-lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
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
    "jais2": ("Jais2Config", {**_HEADS, "num_key_value_heads": 4}),
    "mellum": (
        "MellumConfig",
        {
            **_HEADS,
            **_SLIDING,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        },
    ),
    "hyperclovax": ("HyperCLOVAXConfig", {}),
    "ax-k1": ("AXK1Config", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "cohere2-moe": (
        "Cohere2MoeConfig",
        {**_HEADS, **_MOE, **_SLIDING, "tie_word_embeddings": True, "logit_scale": 0.25},
    ),
    "dbrx": (
        "DbrxConfig",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 128,
                "ffn_hidden_size": 128,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    "deepseek-v4": (
        "DeepseekV4Config",
        {
            **_MOE,
            "n_routed_experts": 8,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "q_lora_rank": 64,
            "o_lora_rank": 64,
            "o_groups": 2,
            "index_n_heads": 2,
            "index_head_dim": 64,
            "layer_types": [
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
    ),
    "falcon-mamba": ("FalconMambaConfig", {}),
    "granite-swa": (
        "GraniteSWAConfig",
        {**_SLIDING, "attention_multiplier": 0.2, "layer_rope_theta": [10000.0] * 3},
    ),
    "granite-moe-swa": (
        "GraniteMoeSWAConfig",
        {
            **_SLIDING,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "attention_multiplier": 0.2,
            "layer_rope_theta": [10000.0] * 3,
        },
    ),
    "hy-v3": (
        "HYV3Config",
        {
            **_HEADS,
            **_MOE,
            **_SPARSE,
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 128,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    "hy-v4": (
        "HYV4Config",
        {
            **_LATENT,
            **_SPARSE,
            "n_shared_experts": 1,
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full"] * 3,
            "index_n_heads": 2,
            "index_head_dim": 64,
        },
    ),
    "inkling": (
        "InklingTextConfig",
        {
            **_HEADS,
            **_SPARSE,
            "swa_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "sliding_window_size": 24,
            "rel_extent": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        },
    ),
    "laguna": (
        "LagunaConfig",
        {
            **_HEADS,
            **_MOE,
            **_SLIDING,
            **_SPARSE,
            "shared_expert_intermediate_size": 128,
            "num_attention_heads_per_layer": [4] * 3,
        },
    ),
    "longcat-flash": (
        "LongcatFlashConfig",
        {
            **_LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 128,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
    ),
    "mimo-v2-flash": (
        "MiMoV2FlashConfig",
        {
            **_MOE,
            **_SLIDING,
            **_SPARSE,
            "head_dim": 96,
            "v_head_dim": 64,
            "n_routed_experts": 8,
            "hybrid_layer_pattern": [1, 0, 1],
            "moe_layer_freq": [0, 1, 1],
            "layernorm_epsilon": 1e-5,
            "swa_num_key_value_heads": 4,
            "swa_num_attention_heads": 4,
            "swa_head_dim": 96,
            "swa_v_head_dim": 64,
            "add_swa_attention_sink_bias": True,
            "sliding_window_size": 24,
        },
    ),
    "blip-2": (
        "Blip2Config",
        {"text_config": {"ffn_dim": 256, "word_embed_proj_dim": 128, "model_type": "opt"}},
    ),
    "aria": (
        "AriaConfig",
        {
            "text_config": {
                **_HEADS,
                "model_type": "aria_text",
                "moe_num_experts": 8,
                "moe_topk": 2,
                "moe_num_shared_experts": 1,
                "intermediate_size": 128,
            }
        },
    ),
    "cohere2-vision": (
        "Cohere2VisionConfig",
        {
            "text_config": {
                **_HEADS,
                **_SLIDING,
                "model_type": "cohere2",
                "logit_scale": 0.25,
                "tie_word_embeddings": True,
            }
        },
    ),
    "cosmos3-edge": ("Cosmos3EdgeConfig", {"text_config": {**_HEADS, **_POSITIONS}}),
    "ernie4.5-vl-moe": (
        "Ernie4_5_VLMoeConfig",
        {
            "text_config": {
                **_SPARSE,
                **_HEADS,
                "moe_num_experts": 8,
                "moe_k": 2,
                "moe_intermediate_size": [128, 64],
                "rope_parameters": {**_ROPE, "mrope_section": [5, 5, 6]},
            }
        },
    ),
    "exaone4.5": (
        "Exaone4_5_Config",
        {"text_config": {**_SLIDING, "model_type": "exaone4", "sliding_window_pattern": 2}},
    ),
    "gemma4-vl": (
        "Gemma4Config",
        {
            "text_config": {
                **_HEADS,
                **_SLIDING,
                "num_kv_shared_layers": 1,
                "global_head_dim": 64,
                "hidden_size_per_layer_input": 128,
                "vocab_size_per_layer_input": 512,
            },
            "vision_config": {**_TOWER, "head_dim": 32, "num_key_value_heads": 2},
        },
    ),
    "gemma4-unified": (
        "Gemma4UnifiedConfig",
        {
            "text_config": {**_HEADS, **_SLIDING, "global_head_dim": 64},
            "vision_config": {**_TOWER, "head_dim": 32, "num_key_value_heads": 2},
        },
    ),
    "glm4v": (
        "Glm4vConfig",
        {
            "text_config": {
                "attention_bias": True,
                "rope_parameters": {
                    **_ROPE,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                },
            }
        },
    ),
    "glm4v-moe": (
        "Glm4vMoeConfig",
        {
            "text_config": {
                **_HEADS,
                **_MOE,
                "n_routed_experts": 8,
                "use_qk_norm": False,
                "rope_parameters": {
                    **_ROPE,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                },
            }
        },
    ),
    "glm5-next": (
        "Glm5NextConfig",
        {
            "text_config": {
                **_LATENT,
                **_SPARSE,
                "qk_rope_head_dim": 0,
                "index_n_heads": 2,
                "index_head_dim": 64,
                "linear_head_dim": 64,
                "linear_num_heads": 2,
                "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
                "indexer_types": ["full"] * 3,
            }
        },
    ),
    "glm-asr": ("GlmAsrConfig", {"text_config": _LLAMA}),
    "glm-ocr": (
        "GlmOcrConfig",
        {
            "text_config": {
                **_HEADS,
                "rope_parameters": {
                    **_ROPE,
                    "partial_rotary_factor": 1.0,
                    "mrope_section": [4, 6, 6],
                },
            }
        },
    ),
    "granite4-vision": (
        "Granite4VisionConfig",
        {
            "text_config": {"model_type": "granite"},
            "spatial_target_layers": [0, 1, 1, 2],
            "deepstack_layer_map": [[0, 0]],
            "downsample_rate": "1/2",
        },
    ),
    "granite-speech": ("GraniteSpeechConfig", {"text_config": {"model_type": "granite"}}),
    "granite-speech-plus": ("GraniteSpeechPlusConfig", {"text_config": {"model_type": "granite"}}),
    "idefics3": ("Idefics3Config", {"text_config": _LLAMA}),
    "internvl": ("InternVLConfig", {"text_config": {"model_type": "qwen2"}}),
    "lfm2-vl": (
        "Lfm2VlConfig",
        {
            "text_config": {
                **_SHORT_CONVOLUTION,
                "model_type": "lfm2",
                "block_dim": 128,
                "conv_dim": 128,
                "tie_word_embeddings": True,
            }
        },
    ),
    "llama4-vl": (
        "Llama4Config",
        {
            "text_config": {
                **_HEADS,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 256,
            },
            "pad_token_id": 0,
        },
    ),
    "llava": ("LlavaConfig", {"text_config": _LLAMA}),
    "llava-next": ("LlavaNextConfig", {"text_config": _LLAMA}),
    "llava-next-video": ("LlavaNextVideoConfig", {"text_config": _LLAMA}),
    "llava-onevision": ("LlavaOnevisionConfig", {"text_config": {"model_type": "qwen2"}}),
    "minicpm-v-4.6": (
        "MiniCPMV4_6Config",
        {"text_config": {**_HEADS, **_DELTA, "model_type": "qwen3_5_text"}},
    ),
    "minicpm-v-4.7": (
        "MiniCPMV4_7Config",
        {"text_config": {**_HEADS, **_DELTA, "model_type": "qwen3_5_text"}},
    ),
    "minimax-m3": (
        "MiniMaxM3VLConfig",
        {
            "text_config": {
                **_HEADS,
                **_SPARSE,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "rotary_dim": 16,
                "dense_intermediate_size": 256,
                "shared_intermediate_size": 128,
                "intermediate_size": 128,
                "layer_types": ["full_attention"] * 3,
                "index_head_dim": 32,
            }
        },
    ),
    "muse-glimmer": (
        "MuseGlimmerConfig",
        {
            "text_config": {**_HEADS, **_SLIDING, "layer_rope_theta": [10000.0, 0, 10000.0]},
            "out_hidden_size": 64,
        },
    ),
    "nemotron-omni": (
        "NemotronH_Omni_Reasoning_V3_Config",
        {"text_config": _NEMOTRON_H},
    ),
    "paddleocr-vl": (
        "PaddleOCRVLConfig",
        {
            "text_config": {
                **_HEADS,
                "tie_word_embeddings": True,
                "rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]},
            }
        },
    ),
    "paligemma": (
        "PaliGemmaConfig",
        {"text_config": {**_HEADS, "model_type": "gemma", "tie_word_embeddings": True}},
    ),
    "qianfan-ocr": (
        "QianfanOCRConfig",
        {
            "text_config": {**_HEADS, "model_type": "qwen3"},
            "min_dynamic_patch": 1,
            "max_dynamic_patch": 12,
            "dynamic_image_size": True,
            "use_thumbnail": True,
        },
    ),
    "qwen2-audio": ("Qwen2AudioConfig", {"text_config": {"model_type": "qwen2"}}),
    "qwen2-vl": ("Qwen2VLConfig", {"text_config": _POSITIONS}),
    "qwen3-asr": (
        "Qwen3ASRConfig",
        {
            "text_config": {
                **_HEADS,
                **_POSITIONS,
                "model_type": "qwen3",
                "tie_word_embeddings": True,
            }
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {
                **_HEADS,
                **_MOE,
                **_POSITIONS,
                "moe_intermediate_size": 256,
                "norm_topk_prob": True,
            },
            **_PICTURES,
        },
    ),
    "step3.7": (
        "Step3p7Config",
        {
            "text_config": {
                **_HEADS,
                **_SPARSE,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 128,
                "share_expert_dim": 128,
                "num_sliding_attention_heads": 4,
                "query_pre_attn_scalar": 32,
                "sliding_window": 24,
                "layer_types": ["full_attention"] * 3,
            }
        },
    ),
    "cohere-compass": (
        "CohereCompassConfig",
        {
            "text_config": {
                **_SLIDING,
                "logit_scale": 0.25,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "full_attention": {**_ROPE, "mrope_section": [6, 6, 4]},
                    "sliding_attention": {**_ROPE, "mrope_section": [6, 6, 4]},
                },
            }
        },
    ),
    "diffusion-gemma": (
        "DiffusionGemmaConfig",
        {
            "text_config": {
                **_HEADS,
                **_SLIDING,
                "global_head_dim": 64,
                "num_experts": 8,
                "top_k_experts": 2,
                "moe_intermediate_size": 128,
            },
            "vision_config": {**_TOWER, "model_type": "gemma4_vision"},
        },
    ),
    "emu3": (
        "Emu3Config",
        {
            "text_config": {},
            "vocabulary_map": {
                "<image>": 500,
                "<|extra_200|>": 501,
                "<|visual token 000000|>": 502,
            },
        },
    ),
    "hunyuan-vl": (
        "HunYuanVLConfig",
        {
            "text_config": {
                **_HEADS,
                "rope_parameters": {**_ROPE, "mrope_section": [4, 4, 4, 4]},
            }
        },
    ),
    "qwen4-exp": ("Qwen4ExpTextConfig", _QWEN_4),
    "qwen4-exp-vl": ("Qwen4ExpConfig", {"text_config": _QWEN_4}),
    "voxtral": ("VoxtralConfig", {"text_config": _LLAMA, "hidden_size": 128}),
    "qwen3.5-wide": (
        "Qwen3_5TextConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 3,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "lfm2-wide": (
        "Lfm2Config",
        {
            **_SHORT_CONVOLUTION,
            "hidden_size": 2048,
            "block_dim": 2048,
            "conv_dim": 2048,
            "block_ff_dim": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "granite-4-h-wide": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA_LAYERS,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "shared_intermediate_size": 8192,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
    ),
    "falcon-h1-wide": (
        "FalconH1Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
        },
    ),
    "deepseek-v2-lite-wide": (
        "DeepseekV2Config",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "nemotron-3-nano-wide": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "ME*",
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "time_step_min": 1e-30,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5,
        },
    ),
    "mamba2-wide": (
        "Mamba2Config",
        {
            "hidden_size": 768,
            "intermediate_size": 1536,
            "num_heads": 24,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
        },
    ),
}
"""Name → transformers' configuration class, and the differences from `SIZES` and `_TOKENS`.

"-wide" has the sizes of a published model but for vocabulary and number of layers: Qwen3.5-2B,
LFM2-1.2B, Granite-4.0-H-Micro, Falcon-H1-0.5B, Mamba-2 130M, DeepSeek-V2-Lite (6 of 64 experts),
Nemotron 3 Nano (8 of 128 experts).
"""


_PEAK = 3.0
"""Standard deviation of an untrained model's logits.

Flat distributions would hide the effect of mismatch on peaks.
"""
_MOST = 1 << 28
"""Most parameters of a model that is written."""
_SURE = 0.8
"""Mean probability of the likeliest token beyond which a model's head is made smaller.

If the head is the embedding, and the embedding is most of the hidden states (Gemma, Cohere), an
untrained model repeats its last token. Its answers would be equal, and it would learn nothing.
"""


def write_model(name: str, folder: Path, seed: int = 0) -> None:
    """Write a random model of the family, with every parameter drawn, and a generic tokenizer."""
    kind, changes = FAMILIES.get(name, (name, {}))
    if name not in FAMILIES and "text_config" in getattr(transformers, kind).sub_configs:
        changes = {"text_config": {}}
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
    settings = {**SIZES, **_TOKENS, **changes}
    if "text_config" in changes:
        text = {**SIZES, **_TOKENS, **changes["text_config"]}
        settings = {
            "tie_word_embeddings": text["tie_word_embeddings"],
            **_small_towers(kind),
            **changes,
            "text_config": text,
        }
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(seed)
    architecture = _class_of(config, "text_config" in changes)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in architecture._from_config(config).parameters())
    if parameters > _MOST:
        raise ValueError(f"{parameters:,} parameters, because its sizes have other names")
    model = architecture._from_config(config, dtype=torch.float32)
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
        spread = float(_logits(model, tokens).std())
        whole_head = model.get_output_embeddings()
        head = (whole_head or model.language_model.get_output_embeddings()).weight
        head.mul_(_PEAK / spread)
        while _sureness(model, tokens) > _SURE:
            head.mul_(0.8)
    model.save_pretrained(folder)
    if kind in _TOKENS_OF:
        file = folder / "tokenizer_config.json"
        tokenizer = json.loads(file.read_text())
        file.write_text(json.dumps({**tokenizer, "extra_special_tokens": _TOKENS_OF[kind]}))
    if kind in _PROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[kind]))
    _write_as_published(folder)


def _sureness(model: Any, tokens: torch.Tensor) -> float:
    """Return the mean probability of the likeliest token after each of these."""
    return float(_logits(model, tokens).softmax(-1).max(-1).values.mean())


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return a model's logits after these tokens, of its language model if it needs pictures."""
    parameters = inspect.signature(model.forward).parameters
    needs_pictures = parameters.get("pixel_values")
    if needs_pictures is not None and needs_pictures.default is inspect.Parameter.empty:
        model = model.language_model
    return model(input_ids=tokens).logits.float()


def _write_as_published(folder: Path) -> None:
    """Correct what transformers 5.19 writes wrong: a part of a name twice, for models with sound,
    names of a tower in the language model and sizes of pictures twice (Qianfan-OCR), and stacks of
    experts that are published transposed (Qwen3-VL's mixtures).
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    turned = config.model_type == "qwen3_vl_moe"
    if config.model_type == "qianfan_ocr":
        settings = json.loads((folder / "config.json").read_text())
        tower = settings["vision_config"]
        tower |= {key: tower[key][0] for key in ("image_size", "patch_size")}
        (folder / "config.json").write_text(json.dumps(settings))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        names = {name: name.replace(".model.model.", ".model.") for name in tensors}
        names = {
            name: own.replace(".model.encoder.layers.", ".model.layers.")
            if own.startswith("language_model.")
            else own
            for name, own in names.items()
        }
        tensors = {
            names[name]: tensor.transpose(1, 2).contiguous()
            if turned and tensor.ndim == 3
            else tensor
            for name, tensor in tensors.items()
        }
        save_file(tensors, file, metadata={"format": "pt"})


def _class_of(config: transformers.PreTrainedConfig, has_towers: bool) -> Any:
    """Return transformers' class that writes text for a configuration, with towers or without."""
    mappings = [
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ]
    if not has_towers:
        mappings.reverse()
    names = next(m[config.model_type] for m in mappings if config.model_type in m)
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _small(name: str, size: Any) -> Any:
    """Return a tower's size by its field's name, an integer if it was one."""
    small = _TOWER_SIZES.get(name, size)
    return int(small) if type(size) is int and isinstance(small, float) else small


def _small_towers(kind: str) -> dict[str, Any]:
    """Return settings of a model with towers: their sizes small, and its tokens' numbers in range.

    kind: transformers' class of its configuration.
    """
    settings = {}
    number = SIZES["vocab_size"] - 12
    for key, value in getattr(transformers, kind)().to_dict().items():
        if isinstance(value, dict) and key.endswith("_config") and key != "text_config":
            sizes = {name: _small(name, size) for name, size in value.items()}
            settings[key] = {name: size for name, size in sizes.items() if name not in _DERIVED}
        elif key.endswith(("_token_id", "_token_index")) and key not in _TOKENS:
            settings[key] = number
            number += 1
        elif key in _TOWER_SIZES:
            settings[key] = _TOWER_SIZES[key]
    return settings
