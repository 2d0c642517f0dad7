"""Loading a transformers model folder or hub id as a causal LM whose parameters are the masters."""

import copy
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from qarl.configs.errors import ModelError
from qarl.configs.hub import hub_or_cache
from qarl.quant.checkpoint.check_folder import check_model
from qarl.quant.checkpoint.contents import (
    check_contents,
    has_own_head,
    record_tie,
    refuse_missing,
    refuse_unread,
    set_tie,
)
from qarl.quant.checkpoint.families import fused_experts
from qarl.quant.checkpoint.folder import local_folder, not_in_hub, tensor_shapes, weight_files
from qarl.quant.checkpoint.read_rows import reading_rows
from qarl.quant.checkpoint.settings import inputs_beside_text
from qarl.quant.checkpoint.shapes import expert_modules, weight_shapes
from qarl.quant.checkpoint.whole import Whole, language_config, whole_of
from qarl.quant.runtime.replaced import replaced
from qarl.quant.runtime.shards import own_rows


def resolve_model(name: str) -> Path:
    """Return the local folder of a model.

    That is `name` itself, or the hub's snapshot of that id, which is downloaded if needed. Raises
    `ModelError`.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    read = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
    try:
        with hub_or_cache():
            return Path(snapshot_download(name, allow_patterns=read))
    except Exception as error:
        raise not_in_hub(name, error) from error


def load_config(name: str) -> PreTrainedConfig:
    """Return the architecture of a model folder or hub id, from its config.json only.

    Raises `ModelError`.
    """
    folder = local_folder(name)
    if folder is not None:
        check_model(folder)
    try:
        with nullcontext() if folder else hub_or_cache():
            return AutoConfig.from_pretrained(folder or name)
    except Exception as error:
        raise ModelError(
            f"model {name!r}: its config.json could not be read: {_first_lines(error)}"
        ) from error


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a causal LM of this architecture on the meta device.

    It has names and shapes of parameters, and takes no memory.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def causal_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Return `empty_model` of this architecture, or of the language model that it has for text.

    Raises `ModelError` for another one, by the name under which the user gave it.
    """
    beside = inputs_beside_text(vars(config))
    text = language_config(config) if beside else config
    if beside and text is None:
        raise ModelError(
            f"model {name!r} is a {config.model_type!r}, which takes {' and '.join(beside)} beside"
            " text, and transformers has no class for its language model alone; give a model of"
            " text (Qwen3, Llama, Mistral, …), or one with pictures whose language model has"
            " (Qwen3-VL, Gemma 3, Mistral 3, SmolVLM)"
        )
    if text is None or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model {name!r} is a {config.model_type!r}, no causal language model; give one that"
            " writes text from left to right (Qwen3, Llama, Mistral, …)"
        )
    model = empty_model(text)
    model.config.name_or_path = config.name_or_path
    return model


def model_skeleton(folder: Path) -> PreTrainedModel:
    """Return the model in `folder` on the meta device: names, kinds and shapes of its layers.

    The output head is tied to the embedding if it is so in the files (`contents.has_own_head`).

    Raises `ModelError` for what `check_model` refuses, for a config.json of an unknown
    architecture, and for files that are of another model; `SchemeError` for experts whose
    checkpoint layout is unknown.
    """
    check_model(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        model = causal_model(str(folder), config)
    except ModelError:
        raise
    except Exception as error:
        words = _first_lines(error)
        raise ModelError(
            f"model {str(folder)!r} cannot be built from its config.json: {words}"
        ) from error
    stored = tensor_shapes(folder) if weight_files(folder) else {}
    if has_own_head(folder, model, stored):
        set_tie(model.config, tied=False)
        model = empty_model(model.config)
        model.config.name_or_path = config.name_or_path
    _check_experts(folder, model, stored)
    check_contents(folder, model, stored)
    return model


def _first_lines(error: Exception) -> str:
    """Return a library's error message without its lists of everything it knows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"


def _check_experts(
    folder: Path,
    model: PreTrainedModel,
    stored: dict[str, list[int]],
) -> None:
    """Raise `ModelError` for experts' tensors that are missing, too many, or of another size.

    transformers would report shapes of the stack that it makes of the experts it reads. A layer
    without any expert under the layout's names is left to the loader: it may be stored fused, or
    under a prefix that the loader strips.
    """
    layers = expert_modules(model)
    if not layers:
        return
    expected = {f"{name}.weight": list(shape) for name, shape in weight_shapes(model).items()}
    pairs = []
    for layer in layers:
        one_expert = re.compile(rf"{re.escape(layer)}\.\d+\.")
        if any(map(one_expert.match, stored)):
            names = filter(one_expert.match, {**expected, **stored})
            pairs += [(name, stored.get(name), expected.get(name)) for name in names]
    wrong = [
        f"{name!r} is {shape or 'missing'} instead of {expected_shape or 'none'}"
        for name, shape, expected_shape in pairs
        if shape != expected_shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ModelError(
            f"model {str(folder)!r} has other experts than its config.json: {wrong[0]}{more}; copy"
            " it again"
        )


def load_masters(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
    skeleton: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Return the model in `folder`, every parameter in the master dtype, ready for `LowBitModel`.

    Raises what `model_skeleton` raises, and `ModelError` for truncated or missing tensors, and for
    tensors with NaN or infinity among this process's rows.

    Args:
        folder: a local model folder.
        dtype: fp32 or bf16.
        device: device of the masters, on which the learner computes. Default: the CPU.
        mesh: processes that share every parameter, each with some rows (`quant.runtime.shards`).
            None: this process has all rows.
        skeleton: what `model_skeleton` returned for the folder, if it was asked before.
    """
    if skeleton is None:
        skeleton = model_skeleton(folder)
    whole = whole_of(skeleton.config)
    kind, options = (AutoModelForCausalLM, {}) if whole is None else _part(whole, skeleton)
    try:
        with reading_rows(mesh) if mesh else nullcontext(), _towers_unread(folder, whole, kind):
            loaded: Any = kind.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **options
            )
        model, info = loaded
    except Exception as error:
        raise ModelError(
            f"model {str(folder)!r} could not be loaded: {_first_lines(error)}"
        ) from error
    refuse_missing(folder, model, info["missing_keys"])
    refuse_missing(folder, model, [str(key) for key in info.get("mismatched_keys", ())])
    refuse_unread(folder, model, info["unexpected_keys"])
    record_tie(model)
    # transformers forgets it of a language model that is part of another model
    model.config.name_or_path = str(folder)
    check_finite(folder, model)
    return model.eval() if device is None else model.eval().to(device)


def _part(whole: Whole, skeleton: PreTrainedModel) -> tuple[Any, dict[str, Any]]:
    """Return the class that loads a language model from the checkpoint of its whole, and options.

    skeleton: the language model on the meta device.
    """
    names = {f"^{re.escape(theirs)}": own for own, theirs in whole.prefixes if own != theirs}
    return type(skeleton), {"config": copy.deepcopy(skeleton.config), "key_mapping": names}


def _towers_unread(folder: Path, whole: Whole | None, kind: Any) -> AbstractContextManager[None]:
    """Return a context in which transformers reports no tensors of towers as left out."""
    if whole is None:
        return nullcontext()
    towers = [name for name in tensor_shapes(folder) if not whole.own_name(name)]
    patterns = [f"^{re.escape(name)}$" for name in towers]
    return replaced(kind, _keys_to_ignore_on_load_unexpected=patterns)


def matrices_on_host(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model from the host's memory to a device, except for matrices its layers copy there.

    These are weights of linear layers and stacks of experts; the context's `device` tells layers
    where to copy them. For a GPU they are pinned.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    stacks = {id(p) for _, m in fused_experts(model) for p in m.parameters() if p.ndim == 3}
    # an output head that is tied to the embedding is not offloaded
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    offloaded = (linear | stacks) - embeddings
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in offloaded:
            tensor.data = tensor.data.to(device)
        elif device.type == "cuda":
            tensor.data = tensor.data.pin_memory()
    return model


def check_finite(folder: Path | str, model: PreTrainedModel) -> None:
    """Raise `ModelError` for a parameter with NaN or infinity.

    One pass suffices: both extremes are finite only if all values are.
    """
    for name, master in model.named_parameters():
        rows = own_rows(master.detach())
        if rows.numel() == 0:
            continue
        extremes = torch.stack(torch.aminmax(rows))
        if not extremes.isfinite().all():
            raise ModelError(
                f"model {str(folder)!r}: tensor {name!r} holds NaN or infinity; take another copy"
                " of the checkpoint"
            )
