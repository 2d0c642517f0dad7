"""Architectures that a GGUF file can have: their names, their settings, and what llama.cpp assumes.

llama.cpp rotates queries and keys of `llama` files in adjacent pairs of rows, transformers in
halves of a head. So the rows of q and k change places in such a file, and their codes and scales
with them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, TensorNameMap
from transformers import PreTrainedConfig

from qarl.quant.checkpoint.families import family_of
from qarl.sync.gguf.errors import GgufError

_ROUTED = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_LAYERS_OF_27B = 62
"""Number of layers by which llama.cpp recognizes Gemma 3 27B."""
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.(q|k)_proj")


@dataclass(frozen=True)
class Family:
    """One architecture of transformers as llama.cpp has it."""

    arch: MODEL_ARCH
    """llama.cpp's architecture."""
    permutes: bool = False
    """True if rows of q and k change places."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of config.json that llama.cpp does not read, with the values that it assumes."""
    norm_offset: float = 0.0
    """Number that the model adds to the weights of its norms, in fp32; llama.cpp adds none."""

    def permuted_heads(self, layer: str, config: PreTrainedConfig) -> int | None:
        """Return the number of heads whose rows change places in a layer, None if none do."""
        match = _ROTATED.fullmatch(layer) if self.permutes else None
        if match is None:
            return None
        return config.num_attention_heads if match[1] == "q" else config.num_key_value_heads


FAMILIES: Mapping[str, Family] = {
    "llama": Family(MODEL_ARCH.LLAMA, permutes=True, assumed={"mlp_bias": False}),
    "mistral": Family(MODEL_ARCH.LLAMA, permutes=True),
    "mixtral": Family(MODEL_ARCH.LLAMA, permutes=True),
    "qwen2": Family(MODEL_ARCH.QWEN2),
    "qwen2_moe": Family(MODEL_ARCH.QWEN2MOE, assumed={"norm_topk_prob": False, **_ROUTED}),
    "qwen3": Family(MODEL_ARCH.QWEN3, assumed={"attention_bias": False}),
    "qwen3_moe": Family(
        MODEL_ARCH.QWEN3MOE, assumed={"norm_topk_prob": True, "attention_bias": False, **_ROUTED}
    ),
    "gemma3_text": Family(
        MODEL_ARCH.GEMMA3,
        assumed={
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        norm_offset=1.0,
    ),
}
"""Model type of transformers → the architecture."""


def gguf_family(config: PreTrainedConfig) -> Family:
    """Return the family of a model.

    Raises `GgufError` for an unsupported model type, or a setting that llama.cpp would ignore.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise GgufError(
            f"model type {config.model_type!r} is not among those that QaRL writes as GGUF:"
            f" {', '.join(FAMILIES)}; serve the export with `qarl serve`"
        )
    for name, assumed in {"hidden_act": "silu", **family.assumed}.items():
        value = getattr(config, name, assumed)
        if value != assumed:
            _refuse(config, name, value, f"assumes {assumed!r}")
    if family.arch == MODEL_ARCH.GEMMA3:
        _require_gemma_attention(config)
    else:
        slides = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if slides else None
        if window is not None and window < config.max_position_embeddings:
            _refuse(config, "sliding_window", window, "attends to every token")
    rope = _rope(config)
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        _refuse(config, "rope_type", rope["rope_type"], "has default, linear and llama3 from here")
    return family


def _require_gemma_attention(config: PreTrainedConfig) -> None:
    """Raise `GgufError` unless layers, windows and scale are those that llama.cpp builds in.

    It has windows on all layers but every sixth, turns those by base 10000 without scaling, and
    divides scores by the root of a head's columns; of 62 layers (27B), by that of hidden size over
    heads.
    """
    layers = config.num_hidden_layers
    pattern = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(layers)]
    if config.layer_types != pattern:
        _refuse(config, "layer_types", config.layer_types, "has windows on all but every sixth")
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    turned = {name: config.rope_parameters["sliding_attention"].get(name) for name in local}
    if turned != local:
        _refuse(config, "rope_parameters of windows", turned, f"has {local}")
    columns = head_columns(config)
    if layers == _LAYERS_OF_27B:
        columns = config.hidden_size // config.num_attention_heads
    if config.query_pre_attn_scalar != columns:
        scalar = config.query_pre_attn_scalar
        _refuse(config, "query_pre_attn_scalar", scalar, f"assumes {columns}")


def _refuse(config: PreTrainedConfig, name: str, value: Any, reason: str) -> None:
    raise GgufError(
        f"the model's config.json has {name} {value!r}, and llama.cpp {reason} for model type"
        f" {config.model_type!r}; serve the export with `qarl serve`"
    )


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of rotary embeddings, with their type under `rope_type`."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    # of two kinds of layers, those without windows are the ones that llama.cpp reads settings of
    rope = rope.get("full_attention", rope)
    return {"rope_type": "default", **rope}


def tensor_names(config: PreTrainedConfig, family: Family) -> TensorNameMap:
    """Return the map from checkpoint names to names in the file."""
    return TensorNameMap(family.arch, config.num_hidden_layers)


def head_columns(config: PreTrainedConfig) -> int:
    """Return the columns of an attention head."""
    default = config.hidden_size // config.num_attention_heads
    return getattr(config, "head_dim", None) or default


def rope_factors(config: PreTrainedConfig) -> torch.Tensor | None:
    """Return the divisors of llama3's rotary frequencies, fp32 [columns of a head / 2].

    None for other types. Frequencies with a wavelength of up to original / high_freq_factor tokens
    stay, those beyond original / low_freq_factor are divided by `factor`, and between the two the
    frequency is interpolated. (Llama 3.1's definition, as in transformers' `llama3`.)
    """
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    columns = head_columns(config)
    powers = torch.arange(0, columns, 2, dtype=torch.int64).to(torch.float32) / columns
    frequency = 1.0 / (rope["rope_theta"] ** powers)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * frequency / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    scaled = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
    return frequency / scaled


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of q or k in llama.cpp's order: [O, ...] → [O, ...].

    Row i of a head's first half comes beside row i of its second half.
    """
    halves = rows.view(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_settings(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the architecture's settings to a file."""
    columns = head_columns(config)
    rope = _rope(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(columns)
    writer.add_value_length(columns)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(columns)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    local = config.rope_parameters.get("sliding_attention")
    if local is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(local["rope_theta"])
    _write_experts(writer, config)


def _write_experts(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the sizes of a mixture of experts, if the model is one."""
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    width = getattr(config, "moe_intermediate_size", None)
    if width:
        writer.add_expert_feed_forward_length(width)
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)


def expert_projections(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the checkpoint's names of an expert's gate, up and down projection."""
    return family_of(config.model_type).experts.projections


def architecture_name(family: Family) -> str:
    """Return the architecture's name in a file, such as "llama"."""
    return MODEL_ARCH_NAMES[family.arch]
