"""What config.json says of a model: its positions, its layers with states, its parts beside the
language model.

It reads JSON alone and imports neither torch nor transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.quant.checkpoint.folder import read_config, text_config

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_STATE_SETTINGS = (
    "linear_num_key_heads",
    "linear_attn_config",
    "mamba_",
    "ssm_",
    "state_size",
    "conv_L_cache",
    "hybrid_override_pattern",
)
"""Beginnings of names of settings that only models with such layers have, or could have."""
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers without a state."""
DELTA_NETS = "gated delta nets"
_MAMBA_2 = "Mamba-2 layers"
_PROMPT_ROUNDING = {
    "linear_num_key_heads": DELTA_NETS,
    "mamba_n_heads": _MAMBA_2,
    "mamba_num_heads": _MAMBA_2,
    "n_mamba_heads": _MAMBA_2,
    "conv_L_cache": "short convolutions",
}
"""Setting that only models with such layers have → the layers' name."""
_FEW_INPUTS = 4
"""Most inputs of a short convolution that rounds prompts and sampled tokens alike in 16 bits."""
_TOWERS = {"vision_config": "pictures", "audio_config": "sound"}
"""Section of config.json that a part for other inputs than text has → these inputs."""
_BESIDE_TEXT = {"vq_config": "pictures", "encoder_config": "sound"}
"""Ends of that section's name in Emu3, and in Granite Speech and VibeVoice-ASR, which has two. A
model without a `text_config` has an encoder of text, or codes of pictures among its own tokens.
"""
EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names that configurations have for the number of experts a token is routed to."""


def positions(config: dict[str, Any]) -> float | None:
    """Return the number of tokens a sequence may have by this config.json; None if unknown."""
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    lengths = (config[key] for key in _LENGTHS if isinstance(config.get(key), int))
    length = next(lengths, None)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in (
        "linear",
        "dynamic",
    )
    # other kinds' positions already include the factor
    factor = rope.get("factor", 1) if scaled else 1
    return length and length * (factor if isinstance(factor, int | float) else 1)


def embedding_rows(folder: Path) -> int | None:
    """Return the number of token ids that the model of a folder can look up; None if unknown."""
    if not (folder / "config.json").is_file():
        return None
    rows = text_config(folder).get("vocab_size")
    return rows if isinstance(rows, int) else None


def prompt_rounding(folder: Path, dtype: str) -> str:
    """Return `rounding_layers` of a folder's model."""
    return rounding_layers(text_config(folder), dtype)


def rounding_layers(config: Mapping[str, Any], dtype: str) -> str:
    """Return the name of a model's layers for which vLLM rounds a prompt otherwise than sampled
    tokens, in the plural; "" if there are none.

    Args:
        config: the settings of config.json that describe the language model.
        dtype: the engine's compute dtype.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds and all(kind in _ATTENTION for kind in kinds):
        return ""
    if config.get("state_size") and config.get("chunk_size"):
        return _MAMBA_2  # of a model that has no other layers
    # `quant.graph.convolution` says when these round alike; in float16 five inputs do not
    few = config.get("conv_L_cache", 0) <= _FEW_INPUTS
    rounds_alike = dtype != "float32" and not config.get("conv_bias") and few
    settings = _PROMPT_ROUNDING.keys() - ({"conv_L_cache"} if rounds_alike else set())
    return next((_PROMPT_ROUNDING[key] for key in sorted(settings) if config.get(key)), "")


def has_states(folder: Path) -> bool:
    """Return whether layers of a folder's model keep a state of one size instead of keys and
    values.

    These are gated delta nets, Mamba's layers and short convolutions, known by their settings.
    """
    config = text_config(folder)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds and all(kind in _ATTENTION for kind in kinds):
        return False
    return any(
        key.startswith(_STATE_SETTINGS) and value not in (None, [], {})
        for key, value in config.items()
    )


def tower_inputs(folder: Path) -> list[str]:
    """Return what a model takes beside text ("pictures", "sound"), by its config.json."""
    if not (folder / "config.json").is_file():
        return []
    return inputs_beside_text(read_config(folder))


def inputs_beside_text(settings: Mapping[str, Any]) -> list[str]:
    """Return what the model of a config.json takes beside text ("pictures", "sound")."""
    sections = dict(_TOWERS)
    if settings.get("text_config") is not None:
        for ending, inputs in _BESIDE_TEXT.items():
            sections |= {key: inputs for key in settings if key.endswith(ending)}
    present = (inputs for key, inputs in sections.items() if settings.get(key) is not None)
    return list(dict.fromkeys(present))


def describe_towers(folder: Path, pictures: int = 0) -> str:
    """Return a line on the parts for pictures or sound that a trained model has beside its language
    model; "" if none.

    pictures: upper bound on the pictures of a prompt.
    """
    inputs = " and ".join(tower_inputs(folder))
    if not inputs:
        return ""
    prompts = f"up to {pictures} pictures a prompt" if pictures else "text only"
    return (
        f"{prompts}: of {str(folder)!r} the language model is trained and published; its part for"
        f" {inputs} stays as it is and is exported with it"
    )
