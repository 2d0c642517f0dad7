"""A transformers model folder or hub id → a causal LM whose parameters are the masters."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from configs.errors import InputError
from quant.checkpoint.missing_experts import expert_faults
from quant.schemes import SchemeError


class ModelError(InputError):
    """A model that is missing, incomplete, already quantized, or of a kind that cannot be trained."""

    heading = "model"


def resolve_model(name: str) -> Path:
    """The local folder of a model: `name` itself, or the hub's snapshot of that id (downloaded if needed)."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"model folder {name!r} does not exist; give a transformers folder, or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]))
    except Exception as error:
        raise ModelError(
            f"model {name!r} is no folder here and could not be had from the hub: {error}; check the id, your "
            "network, and HF_TOKEN for gated models"
        ) from error


def load_config(name: str) -> PreTrainedConfig:
    """The architecture of a model folder or hub id: its config.json, no weights. Raises `ModelError`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_model(folder)
    elif name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"model folder {name!r} does not exist; give a transformers folder, or a hub id (owner/name)")
    try:
        return AutoConfig.from_pretrained(folder if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r}: its config.json could not be read: {error}") from error


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal LM of this architecture on the meta device: names and shapes of its parameters, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_model(folder: Path) -> None:
    """Raise `ModelError` for a folder without a readable config.json, or a checkpoint that is already quantized."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no config.json; give a transformers model folder")
    try:
        written = json.loads(config_file.read_text())
    except ValueError as error:
        raise ModelError(f"{str(config_file)!r} is not JSON: {error}") from error
    if written.get("quantization_config"):
        method = written["quantization_config"].get("quant_method", "unknown method")
        raise ModelError(
            f"model {str(folder)!r} is already quantized ({method}); training needs full-precision masters: give the "
            "original checkpoint"
        )


def model_skeleton(folder: Path) -> PreTrainedModel:
    """The model in `folder` on the meta device: names, kinds and shapes of its layers without any weight.

    Raises `ModelError` for what `check_model` refuses, for a config.json of an unknown architecture, and for experts
    that are incomplete; `SchemeError` for experts whose checkpoint layout is not known.
    """
    check_model(folder)
    try:
        model = empty_model(AutoConfig.from_pretrained(folder))
    except Exception as error:
        raise ModelError(f"model {str(folder)!r} cannot be built from its config.json: {error}") from error
    _check_experts(folder, model)
    return model


def _check_experts(folder: Path, model: PreTrainedModel) -> None:
    try:
        faults = expert_faults(folder, model)
    except SchemeError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"model {str(folder)!r} could not be read, its files may be truncated: {error}") from error
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ModelError(
            f"model {str(folder)!r} has other experts than its config.json: {faults[0]}{more}; copy it again"
        )


def load_masters(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | None = None,
    reading: AbstractContextManager[None] | None = None,
) -> PreTrainedModel:
    """The model in `folder`, every parameter in the master dtype (fp32 or bf16), ready for `LowBitModel`.

    device: where the masters live and the learner computes; None is the CPU. reading: entered while the weights are
    read, for a backend that partitions them as they come.

    Raises what `model_skeleton` raises, and `ModelError` for truncated or missing tensors.
    """
    model_skeleton(folder)
    try:
        with reading or nullcontext():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        model, info = loaded
    except Exception as error:
        raise ModelError(f"model {str(folder)!r} could not be loaded, its files may be truncated: {error}") from error
    if info["missing_keys"] or info.get("mismatched_keys"):
        missing = sorted(info["missing_keys"]) or [str(k) for k in info["mismatched_keys"]]
        raise ModelError(
            f"model {str(folder)!r} lacks {len(missing)} tensors, the first being {missing[0]!r}; copy it again"
        )
    return model.eval() if device is None else model.eval().to(device)
