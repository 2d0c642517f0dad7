"""Checks of a model folder's files before anything is loaded: config.json, tokenizer, weights.

It reads JSON and headers only and imports neither torch nor transformers, so an error is reported
in milliseconds. `quant.checkpoint.load` checks what a loader would find beyond that: names and
shapes of the architecture's tensors.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qarl.configs.errors import ModelError
from qarl.configs.hub import hub_or_cache

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "vocab.txt",
    "tekken.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that are copied beside the tensors: tokenizer, generation config, and
processors of pictures.
"""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_GGUF = ".gguf"
_ONE_WINDOW = ("qwen2", "qwen3", "mimo")
"""Model types that vLLM builds as its `Qwen2Model`, which wants one window for all layers or none.
"""

_PART = 1 << 24
"""Number of bytes of a tensor that are read at once."""

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

_SMALLEST_STEPS = ("nemotron_h", "zamba2")
"""Model types of which transformers takes `time_step_min` for a bound on steps."""
_NO_STEP = 1e-30
"""Bound that no step is below. transformers takes its logarithm, so that it is not 0."""
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

_CHANGING_ROTATIONS = ("dynamic", "longrope", "su")

_TOWERS = {"vision_config": "pictures", "audio_config": "sound"}
"""Section of config.json that a part for other inputs than text has → these inputs."""
_SOUND_ENCODER = "encoder_config"
"""That section's name in Granite Speech. A model without a `text_config` has an encoder of text."""

EXPERTS_A_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names that configurations have for the number of experts a token is routed to."""


def local_folder(name: str) -> Path | None:
    """Return the folder `name`, or None if it reads as a hub id (owner/name).

    Raises `ModelError` for anything else, including a GGUF file.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == _GGUF:
        raise ModelError(f"model {name!r} is a GGUF file; {_gguf_remedy(path)}")
    if path.is_file():
        raise ModelError(
            f"model {name!r} is a file; give the folder of a model in transformers' format"
            " (config.json, tokenizer and *.safetensors)"
        )
    parts = name.split("/")
    is_hub_id = len(parts) == 2 and all(parts) and not name.startswith((".", "~"))
    if not is_hub_id:
        raise ModelError(
            f"model folder {name!r} does not exist; give a transformers folder, or a hub id"
            " (owner/name)"
        )
    return None


def hub_config(name: str) -> Path:
    """Return the config.json of a hub id, downloaded if it is not in the cache.

    Raises `ModelError` if it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    try:
        with hub_or_cache():
            return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        raise not_in_hub(name, error) from error


def not_in_hub(name: str, error: Exception) -> ModelError:
    """Return the error for a hub id whose download failed with `error`."""
    reason = str(error).strip().partition("\n")[0]
    return ModelError(
        f"model {name!r} is not a folder here, and could not be downloaded from the hub:"
        f" {reason}; check the path or the id, the network (HF_ENDPOINT for a mirror, HF_HOME for"
        " a cache filled elsewhere), and HF_TOKEN for gated models"
    )


def check_folder(folder: Path, tokens: int) -> None:
    """Raise `ModelError` if the folder's files show that training from it would fail.

    tokens: number of tokens of prompt and completion together.
    """
    check_model(folder)
    check_context(folder, tokens)
    check_rotary(folder, tokens)
    check_windows(folder, tokens)
    check_steps(folder)
    _check_tokenizer(folder)
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


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json's settings. Raise `ModelError` if it is missing or no JSON object."""
    if not (folder / "config.json").is_file():
        if (folder / "config.yaml").is_file():
            raise ModelError(
                f"{str(folder)!r} is a run, no model; give the model it was trained from (`model`"
                f" in its config.yaml), or, of an unquantized run, {str(folder / 'export')!r}"
            )
        if gguf := _gguf_files(folder):
            raise ModelError(
                f"model folder {str(folder)!r} holds a GGUF file and no config.json;"
                f" {_gguf_remedy(gguf[0])}"
            )
        if (folder / "sft.yaml").is_file():
            raise ModelError(
                f"{str(folder)!r} was written by `qarl sft`; give {str(folder / 'masters')!r} to"
                f" train on, and {str(folder / 'export')!r} to serve or evaluate"
            )
        runs = sorted(file.parent for file in folder.glob("*/config.yaml"))
        instead = (
            f"one of the runs in it, such as {str(runs[-1])!r}"
            if runs
            else "a transformers model folder"
        )
        raise ModelError(f"model folder {str(folder)!r} has no config.json; give {instead}")
    return _read_object(folder / "config.json")


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
    rows = _text_config(folder).get("vocab_size")
    return rows if isinstance(rows, int) else None


def end_tokens(folder: Path) -> set[int]:
    """Return the token ids that end a completion by a folder's files, as vLLM reads them: those of
    generation_config.json, or of config.json if there is none.

    The tokenizer's own end token is another one.
    """
    files = (folder / name for name in ("generation_config.json", "config.json"))
    first = next((file for file in files if file.is_file()), None)
    written = None if first is None else _read_object(first).get("eos_token_id")
    ends = written if isinstance(written, list) else [written]
    return {end for end in ends if isinstance(end, int)}


def check_rotary(folder: Path, tokens: int = 0) -> None:
    """Raise `ModelError` if rotary frequencies depend on the longest sequence computed together.

    A token's log-prob would then depend on what it is packed with, and differ from the engine's.

    tokens: number of tokens of prompt and completion together. LongRoPE with equal factors is
    constant, and vLLM computes it so, up to the original number of positions.
    """
    config = _text_config(folder)
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
    config = _text_config(folder)
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
    config = _text_config(folder)
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


def prompt_rounding(folder: Path, dtype: str) -> str:
    """Return `rounding_layers` of a folder's model."""
    return rounding_layers(_text_config(folder), dtype)


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
    config = _text_config(folder)
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
        sections[_SOUND_ENCODER] = "sound"
    return [inputs for key, inputs in sections.items() if settings.get(key) is not None]


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


def _text_config(folder: Path) -> dict[str, Any]:
    """Return the settings of config.json that describe the language model."""
    config = read_config(folder)
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _check_tokenizer(folder: Path) -> None:
    """Raise `ModelError` if the tokenizer's files are missing or unreadable."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"model folder {str(folder)!r} has no tokenizer (tokenizer.json, tokenizer.model or"
            " vocab.json); copy it from where the model came from"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            _read_object(folder / name)


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer's files contain a chat template."""
    file = folder / "tokenizer_config.json"
    written = _read_object(file) if file.is_file() else {}
    return bool(written.get("chat_template")) or (folder / "chat_template.jinja").is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors files; [] for a checkpoint in another format.

    Raises `ModelError` if a file is missing.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.is_file():
        return [single] if single.is_file() else []
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise ModelError(f"{str(index)!r} has no weight_map; copy it again")
    files = [folder / name for name in sorted(set(names.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"model {str(folder)!r} lacks {len(missing)} of its {len(files)} weight files, the"
            f" first being {missing[0]!r}; copy them too"
        )
    return files


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return name → shape of every tensor, from the files' headers.

    The result is {} for a checkpoint in another format than safetensors. Raises `ModelError` for a
    folder without weights, and for a file that is cut short or no safetensors file.
    """
    files = weight_files(folder)
    if not files and not any(folder.glob("*.bin")):
        if gguf := _gguf_files(folder):
            raise ModelError(
                f"model folder {str(folder)!r} has its weights in a GGUF file;"
                f" {_gguf_remedy(gguf[0])}"
            )
        raise ModelError(
            f"model folder {str(folder)!r} has no weights (model.safetensors, or"
            " model.safetensors.index.json and the files it lists)"
        )
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, "numpy") as tensors:
                shapes |= {
                    name: list(tensors.get_slice(name).get_shape())
                    for name in tensors.keys()  # noqa: SIM118
                }
        except SafetensorError as error:
            raise ModelError(
                f"{str(file)!r} is not a safetensors file, or cut short: {error}; copy it again"
            ) from error
    return shapes


def own_head(folder: Path) -> bool:
    """Return whether the files have an lm_head that differs from the embedding.

    transformers and vLLM keep both then, whatever tie_word_embeddings says. Files that are missing
    count as if they had neither.
    """
    names = _tensor_places(folder)
    heads = [name for name in names if name.endswith("lm_head.weight")]
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    return not same_bytes(folder, heads[0], embeddings[0])


def same_bytes(folder: Path, first: str, second: str) -> bool:
    """Return whether two tensors of the files have the same dtype, shape and bytes.

    Both are read until they differ, in parts of 16 MiB.
    """
    places = _tensor_places(folder)
    (file, start, about), (other_file, other_start, other_about) = places[first], places[second]
    if about != other_about:
        return False
    left = about[0]
    with file.open("rb") as stream, other_file.open("rb") as other_stream:
        stream.seek(start)
        other_stream.seek(other_start)
        while left > 0:
            part = stream.read(min(left, _PART))
            if not part or part != other_stream.read(len(part)):
                return False
            left -= len(part)
    return True


def _tensor_places(folder: Path) -> dict[str, tuple[Path, int, tuple[int, str, tuple[int, ...]]]]:
    """Return name → (file, offset of the first byte, (bytes, dtype, shape)) of every tensor."""
    places = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                # any eight bytes may stand for a size, so that no more is read than there is
                header = json.loads(stream.read(min(size, file.stat().st_size)))
            except ValueError:
                header = None
            if not isinstance(header, dict):
                raise ModelError(
                    f"{str(file)!r} is not a safetensors file, or cut short; copy it again"
                )
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                about = (end - start, entry["dtype"], tuple(entry["shape"]))
                places[name] = (file, 8 + size + start, about)
    return places


def _gguf_files(folder: Path) -> list[Path]:
    """Return the folder's GGUF files."""
    return sorted(file for file in folder.glob("*") if file.suffix.lower() == _GGUF)


def _gguf_remedy(file: Path) -> str:
    """Return instructions for making a folder of a GGUF file, with three lines of Python."""
    folder = str(file.absolute().parent)
    target = file.stem
    return (
        "give the original checkpoint, whose weights were not rounded. If there is none, this"
        " Python makes a transformers folder of the file (pip install gguf first), for --model"
        f" {target}:\n  from transformers import AutoModelForCausalLM, AutoTokenizer; folder, file"
        f" = {folder!r}, {file.name!r}\n  AutoTokenizer.from_pretrained(folder,"
        f" gguf_file=file).save_pretrained({target!r})\n  model ="
        " AutoModelForCausalLM.from_pretrained(folder, gguf_file=file);"
        f" model.hf_quantizer.remove_quantization_config(model); model.save_pretrained({target!r})"
    )


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `ModelError` if it is unreadable or another value."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:  # invalid JSON or invalid UTF-8
        raise ModelError(f"{str(file)!r} is not JSON: {error}; copy it again") from error
    if not isinstance(tree, dict):
        raise ModelError(
            f"{str(file)!r} holds a {type(tree).__name__}, not an object of settings; copy it again"
        )
    return tree


def file_digests(folder: Path) -> dict[str, str]:
    """Return name → SHA-256 of each file that says how the tensors are computed with and asked."""
    names = ("config.json", *COMPANIONS)
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in names
        if (folder / name).is_file()
    }
