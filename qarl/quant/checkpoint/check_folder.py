"""Refusal of folders whose files show that training from them would fail.

It reads JSON and headers only and imports neither torch nor transformers, so an error is reported
in milliseconds. `quant.checkpoint.load` checks what a loader would find beyond that: names and
shapes of the architecture's tensors.
"""

import os
from pathlib import Path
from typing import Any

from qarl.configs.errors import ModelError
from qarl.quant.checkpoint.folder import check_tokenizer, read_config, tensor_shapes, text_config
from qarl.quant.checkpoint.settings import positions

_ONE_WINDOW = ("qwen2", "qwen3", "mimo")
"""Model types that vLLM builds as its `Qwen2Model`, which wants one window for all layers or none.
"""
_SMALLEST_STEPS = ("nemotron_h", "zamba2")
"""Model types of which transformers takes `time_step_min` for a bound on steps."""
_NO_STEP = 1e-30
"""Bound that no step is below. transformers takes its logarithm, so that it is not 0."""
_CHANGING_ROTATIONS = ("dynamic", "longrope", "su")


def check_folder(folder: Path, tokens: int) -> None:
    """Raise `ModelError` if the folder's files show that training from it would fail.

    tokens: number of tokens of prompt and completion together.
    """
    check_model(folder)
    check_context(folder, tokens)
    check_rotary(folder, tokens)
    check_windows(folder, tokens)
    check_steps(folder)
    check_tokenizer(folder)
    tensor_shapes(folder)


def check_model(folder: Path) -> None:
    """Raise `ModelError` if config.json is unreadable, or the checkpoint is already quantized."""
    quantization = read_config(folder).get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "unknown method")
            if isinstance(quantization, dict)
            else quantization
        )
        remedy = _mxfp4_remedy(folder) if method == "mxfp4" else "give the original checkpoint"
        raise ModelError(
            f"model {str(folder)!r} is already quantized ({method}); training needs full-precision"
            f" masters: {remedy}"
        )


def _mxfp4_remedy(folder: Path) -> str:
    """Return instructions for dequantizing gpt-oss, whose original checkpoint is in MXFP4."""
    target = f"{folder.name}-bf16"
    return (
        "give the original checkpoint. If this is the original (gpt-oss), this Python makes a"
        f" folder of its values in bfloat16, for --model {target}:\n  from transformers import"
        f" AutoModelForCausalLM, AutoTokenizer, Mxfp4Config; folder = {str(folder)!r}\n  model ="
        " AutoModelForCausalLM.from_pretrained(folder, dtype='bfloat16',"
        " quantization_config=Mxfp4Config(dequantize=True));"
        f" model.save_pretrained({target!r}, save_original_format=False)\n "
        f" AutoTokenizer.from_pretrained(folder).save_pretrained({target!r})"
    )


def check_context(folder: Path, tokens: int) -> None:
    """Raise `ModelError` if prompt and completion together exceed the model's positions."""
    length = positions(read_config(folder))
    if (
        length is not None
        and tokens > length
        and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1"
    ):
        raise ModelError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens (--max-new-tokens) = {tokens}, but"
            f" the model {str(folder)!r} has {int(length)} positions (max_position_embeddings in"
            " its config.json); lower them until their sum fits"
        )


def check_rotary(folder: Path, tokens: int = 0) -> None:
    """Raise `ModelError` if rotary frequencies depend on the longest sequence computed together.

    A token's log-prob would then depend on what it is packed with, and differ from the engine's.

    tokens: number of tokens of prompt and completion together. LongRoPE with equal factors is
    constant, and vLLM computes it so, up to the original number of positions.
    """
    config = text_config(folder)
    settings = [config.get("rope_scaling"), config.get("rope_parameters")]
    # some models have settings for each kind of layer, nested in these
    settings += [inner for outer in settings if isinstance(outer, dict) for inner in outer.values()]
    for rope in settings:
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in _CHANGING_ROTATIONS:
            continue
        remedy = _dynamic_remedy(config, rope)
        if kind != "dynamic":
            if _equal_factors(rope) and tokens <= _original_length(config, rope):
                continue
            remedy = _longrope_remedy(config, rope)
        raise ModelError(
            f"model {str(folder)!r} has rotary embeddings of type {kind!r}, whose frequencies"
            " depend on the longest sequence beside a token, so that learner and engine would"
            f" disagree; {remedy}"
        )


def _dynamic_remedy(config: dict[str, Any], rope: dict[str, Any]) -> str:
    """Return the change to config.json that makes rotations of type "dynamic" constant."""
    where = "where sequences stay within max_position_embeddings, remove rope_scaling (or"
    if not rope.get("alpha"):
        return f"{where} rope_parameters' rope_type) from its config.json"
    # with alpha the base is another one at every length (HunYuan)
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    size = config.get("head_dim")
    if size is None:
        size = config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    base = theta * rope["alpha"] ** (size / (size - 2)) if size > 2 else theta
    return (
        f"{where} rope_parameters' rope_type and alpha) from its config.json and set rope_theta to"
        f" {base!r}, which is what alpha {rope['alpha']} makes of {theta} at heads of {size}"
    )


def _equal_factors(rope: dict[str, Any]) -> bool:
    """Return whether LongRoPE's frequencies are the same at every length."""
    factors_equal = "short_factor" in rope and rope["short_factor"] == rope.get("long_factor")
    return factors_equal and rope.get("short_mscale") == rope.get("long_mscale")


def _original_length(config: dict[str, Any], rope: dict[str, Any]) -> float:
    """Return LongRoPE's original number of positions; 0 if it is not given."""
    name = "original_max_position_embeddings"
    length = rope.get(name, config.get(name, 0))
    return length if isinstance(length, int | float) else 0


def _longrope_remedy(config: dict[str, Any], rope: dict[str, Any]) -> str:
    """Return the change to config.json that makes LongRoPE constant.

    Removing it would change the model at every length, because it scales attention, too.
    """
    length = _original_length(config, rope)
    return (
        f"where sequences stay within original_max_position_embeddings {length}, set long_factor to"
        " the values of short_factor in its config.json, which computes the same there, and keep"
        f" rollout.max_prompt_tokens + rollout.max_new_tokens within {length}; do not remove"
        " rope_scaling, which also scales attention"
    )


def check_windows(folder: Path, tokens: int) -> None:
    """Raise `ModelError` for sliding windows on some layers, in families in which vLLM has none.

    tokens: number of tokens of prompt and completion together.
    """
    config = text_config(folder)
    layers = config.get("num_hidden_layers")
    kind = config.get("model_type")
    if kind not in _ONE_WINDOW or not isinstance(layers, int):
        return
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "full_attention" if window is None or layer < first else "sliding_attention"
        for layer in range(layers)
    ]
    if len(set(kinds)) < 2 or first == layers:
        return
    remedy = "set use_sliding_window to false and remove layer_types in a copy's config.json"
    fits = window is not None and tokens <= window
    how = (
        f"{remedy}: sequences here have at most {tokens} tokens, for which a window of {window}"
        " changes nothing"
        if fits
        else f"keep rollout.max_prompt_tokens + rollout.max_new_tokens (here {tokens}) within the"
        f" window, and {remedy}, which computes the same up to there; or take another model"
    )
    raise ModelError(
        f"model {str(folder)!r} has a sliding window of {window} on {kinds.count(kinds[-1])} of its"
        f" {layers} layers (max_window_layers {first}), and vLLM, which samples, runs {kind!r} with"
        f" one on all layers or none; {how}"
    )


def check_steps(folder: Path) -> None:
    """Raise `ModelError` for a smallest step of Mamba-2 layers that transformers applies to prompts
    alone and vLLM nowhere.
    """
    config = text_config(folder)
    # transformers' default is 0.001
    smallest = config.get("time_step_min", 0.001)
    if config.get("model_type") not in _SMALLEST_STEPS or not smallest > _NO_STEP:
        return
    raise ModelError(
        f"model {str(folder)!r} has time_step_min {smallest}, below which transformers lets no step"
        " of its Mamba-2 layers fall in a prompt, and vLLM, which samples, does nowhere; set"
        f" time_step_min to {_NO_STEP} in its config.json, with which transformers computes what"
        " vLLM does"
    )
