"""Comparison of the tensors in a checkpoint's files with what its config.json says.

transformers' loader makes up tensors that the files lack, leaves out those that the model has no
place for, and does not tie an output head that differs from the embedding, whatever
tie_word_embeddings says. vLLM follows the files, too. Here a checkpoint whose two parts are of
different models is refused before anything is loaded, and the tie is that of the files.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from qarl.configs.errors import ModelError
from qarl.quant.checkpoint.families import stacks_stored_transposed
from qarl.quant.checkpoint.folder import same_bytes
from qarl.quant.checkpoint.whole import whole_of

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def stored_names(model: PreTrainedModel, files: Iterable[str]) -> dict[str, str]:
    """Return transformers' name → the files' name of each tensor, by the loader's own renamings.

    Of tensors that the loader makes one of, such as a layer's experts, the last is named. Tensors
    of towers are left out.

    Args:
        model: may be on the meta device.
        files: names of the tensors in the files.
    """
    transforms = get_model_conversion_mapping(model)
    renamings: Any = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters: Any = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    expected = model.state_dict()
    prefix = model.base_model_prefix
    whole = whole_of(model.config)
    stored = {name: name for name in files} if whole is None else whole.own_names(list(files))
    names = {}
    for own, name in sorted(stored.items(), key=lambda pair: dot_natural_key(pair[0])):
        renamed, _ = rename_source_key(own, renamings, converters, prefix, expected)
        if renamed not in expected and own in expected:
            renamed = own
        names[renamed] = name
    return names


def has_own_head(folder: Path, model: PreTrainedModel, stored: Collection[str]) -> bool:
    """Return whether the files have an output head that differs from the embedding it is tied to
    by config.json.

    Args:
        folder: the checkpoint.
        model: the model by config.json, on the meta device.
        stored: names of the tensors in the files.
    """
    pairs = model.all_tied_weights_keys
    if not pairs or not stored:
        return False
    names = stored_names(model, stored)
    return any(
        head in names
        and embedding in names
        and not same_bytes(folder, names[head], names[embedding])
        for head, embedding in pairs.items()
    )


def record_tie(model: PreTrainedModel) -> None:
    """Set tie_word_embeddings of a model's config to whether its head is its embedding.

    Everything that is written or built from the config then agrees with the parameters.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    if head is not None and embedding is not None:
        set_tie(model.config, getattr(head, "weight", None) is embedding.weight)


def set_tie(config: PreTrainedConfig, tied: bool) -> None:
    """Set tie_word_embeddings of a config and of its text model's, which is what vLLM reads."""
    for level in (config, config.get_text_config()):
        if bool(getattr(level, "tie_word_embeddings", False)) != tied:
            level.tie_word_embeddings = tied


def check_contents(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, Sequence[int]]
) -> None:
    """Raise `ModelError` if the files and config.json are of different models.

    They are if a tensor has another shape, is missing, or would be left out of a module that the
    model has. Nothing is compared for a checkpoint in another format than safetensors.

    Args:
        folder: the checkpoint, for messages.
        model: the model by config.json, on the meta device.
        stored: name → shape of each tensor in the files.
    """
    if not stored:
        return
    names = stored_names(model, stored)
    whole = whole_of(model.config)
    if whole is not None:
        stored = {own: stored[name] for own, name in whole.own_names(stored).items()}
    _refuse_other_shapes(folder, model, stored)
    tied = model.all_tied_weights_keys
    one_is_stored = {name for pair in tied.items() for name in pair if {*pair} & names.keys()}
    expected = model.state_dict().keys()
    loaded = SimpleNamespace(
        missing_keys=expected - names.keys() - one_is_stored,
        unexpected_keys=names.keys() - expected,
    )
    # the exceptions that the loader makes
    model._adjust_missing_and_unexpected_keys(loaded)  # type: ignore[arg-type]
    refuse_missing(folder, model, loaded.missing_keys)
    refuse_unread(folder, model, loaded.unexpected_keys)


def refuse_missing(folder: Path, model: PreTrainedModel, missing: Collection[str]) -> None:
    """Raise `ModelError` if tensors are missing, which the loader would fill with random values.

    missing: transformers' names.
    """
    if not missing:
        return
    tied = model.all_tied_weights_keys
    # Of a head and its embedding only the embedding is missed.
    missing = {name for name in missing if tied.get(name) not in missing}
    first = min(missing, key=dot_natural_key)
    stored = _cut_from(model, first)
    if stored:
        raise ModelError(
            f"model {str(folder)!r}: transformers cuts {first!r} out of tensors {stored!r} of its"
            f" files (model_type {model.config.model_type!r}), and no part of those is published or"
            " exported here; take another model"
        )
    head = model.get_output_embeddings()
    heads = [f"{name}.weight" for name, module in model.named_modules() if module is head]
    if heads == list(missing):
        remedy = "set tie_word_embeddings to true there if the embedding is the head"
    elif whole_of(model.config) is not None:
        remedy = (
            "names of the whole model may be others than those of its language model alone, and"
            " then take another model"
        )
    else:
        remedy = "correct it there if it is wrong"
    raise ModelError(
        f"model {str(folder)!r} lacks {len(missing)} tensors, the first being {first!r}, which its"
        f" config.json asks for ({_setting(model.config, first)}); {remedy}, or else copy the model"
        " again"
    )


def _cut_from(model: PreTrainedModel, name: str) -> str:
    """Return the end of the files' name of the tensor that transformers cuts `name` out of, which
    others are cut out of, too (HRM-Text); "" if it does not.
    """
    for conversion in get_model_conversion_mapping(model):
        sources, targets = conversion.source_patterns, conversion.target_patterns
        if len(sources) == 1 and len(targets) > 1 and name.endswith(tuple(targets)):
            return sources[0]
    return ""


def refuse_unread(folder: Path, model: PreTrainedModel, unread: Collection[str]) -> None:
    """Raise `ModelError` if the files have tensors of a module of the model that would be left out,
    so that another model would be trained.

    Parts that the model lacks as a whole, such as an image encoder, may be left out.

    unread: transformers' names of the tensors that the loader does not read.
    """
    modules = {name for name, _ in model.named_modules()} - {"", model.base_model_prefix}
    extra_layers = getattr(model.config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0) or 0

    def belongs(name: str) -> bool:
        layer = _LAYER.search(name)
        predicts_ahead = layer and layers <= int(layer[1]) < layers + extra_layers
        parts = name.split(".")
        parents = {".".join(parts[:end]) for end in range(1, len(parts))}
        return bool(parents & modules) and not predicts_ahead

    left_out = sorted(filter(belongs, unread), key=dot_natural_key)
    if left_out:
        raise ModelError(
            f"model {str(folder)!r}: its files have {len(left_out)} tensors for which the model of"
            f" its config.json has no place ({_setting(model.config, left_out[0])}), the first"
            f" being {left_out[0]!r}; training would leave them out: correct config.json, or drop"
            " these tensors if the model computes without them"
        )


def _refuse_other_shapes(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, Sequence[int]]
) -> None:
    """Raise `ModelError` if a tensor's shape in the files differs from that of the architecture.

    Only tensors named by both are compared, because the loader strips prefixes and stacks experts
    of others.
    """
    turned = stacks_stored_transposed(model)
    shapes = {
        name: [tensor.shape[axis] for axis in (0, 2, 1)] if name in turned else list(tensor.shape)
        for name, tensor in model.state_dict().items()
    }
    wrong = [
        (name, list(stored[name]), shape)
        for name, shape in shapes.items()
        if name in stored and list(stored[name]) != shape
    ]
    if not wrong:
        return
    name, in_files, by_config = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    other = [
        (theirs, ours) for theirs, ours in zip(in_files, by_config, strict=False) if theirs != ours
    ]
    fields = [
        f"{field} {ours}, in the files {theirs}"
        for theirs, ours in other
        for field, value in model.config.get_text_config().to_dict().items()
        if type(value) is int and value == ours
    ]
    says = f" ({' or '.join(fields)})" if fields else ""
    raise ModelError(
        f"model {str(folder)!r}: tensor {name!r} is {in_files} in its files and {by_config} by its"
        f" config.json{says}{more}; the two are of different models: copy both from one place, or"
        " correct config.json"
    )


def _setting(config: PreTrainedConfig, name: str) -> str:
    """Return the field of a config on which a tensor depends, with its value, in words."""
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    layer = _LAYER.search(name)
    if layer and layers is not None and int(layer[1]) + 1 >= layers and not name.endswith(".bias"):
        return f"num_hidden_layers {layers}"
    if name.endswith(".bias"):
        biases = {
            key: value
            for key, value in text.to_dict().items()
            if "bias" in key and isinstance(value, bool)
        }
        if biases:
            return ", ".join(f"{key} {str(value).lower()}" for key, value in biases.items())
    if name.rpartition(".")[0].endswith("lm_head"):
        return f"tie_word_embeddings {str(bool(text.tie_word_embeddings)).lower()}"
    return f"model_type {config.model_type!r}"
