"""Checkpoints of a language model beside towers for pictures or sound.

The language model alone is trained, as transformers' class of it for text. Its tensors keep the
names that they have in the checkpoint of the whole, and vLLM samples and learns through its class
of the whole without its towers. Towers are never read: an export copies them from the source.
"""

import copy
import functools
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from qarl.configs.errors import ModelError
from qarl.quant.checkpoint.folder import COMPANIONS, tensor_shapes
from qarl.quant.checkpoint.settings import inputs_beside_text
from qarl.quant.checkpoint.source_config import with_source_fields
from qarl.quant.checkpoint.text_class import has_text_class

_TEXT_CLASSES = {
    "qwen2_vl_text": "Qwen2Config",
    "qwen2_5_vl_text": "Qwen2Config",
    "qwen3_vl_text": "Qwen3Config",
}
"""Type of a language model that transformers has no class for text of → configuration of the same
model. Rotary positions of three rows are equal in text, and then those of one row.
"""
_VLLM_CLASSES = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
"""transformers' class → vLLM's name of it, which published checkpoints have. By transformers' own
name vLLM takes its general class for models of transformers, which replaces this model's router by
a linear layer and fails.
"""
_EMBEDDINGS = ("decoder.embed_tokens.weight", "embed_tokens.weight", "embeddings.weight")
"""Names of embeddings behind "model.": OPT's, most models', Nemotron-H's. The first that one tensor
has is a language model's.
"""
_PREFIX = "model.language_model."
_HEAD = "lm_head"
_TEXT_PREFIX = "model."


@dataclass(frozen=True)
class Whole:
    """The checkpoint that a language model is a part of."""

    settings: Mapping[str, Any]
    """config.json of the whole."""
    prefix: str
    """Beginning of the language model's names in the checkpoint, with a dot at the end."""
    head: str
    """The checkpoint's name of the output head."""
    towers: tuple[str, ...] = ()
    """Names of the modules beside the language model ("visual"); () if the files are unknown."""

    @property
    def architecture(self) -> str:
        """Name of the class of the whole."""
        return str((self.settings.get("architectures") or [""])[0])

    @property
    def prefixes(self) -> tuple[tuple[str, str], ...]:
        """(beginning of the language model's own names, of the checkpoint's names)."""
        return (f"{_HEAD}.", f"{self.head}."), (_TEXT_PREFIX, self.prefix)

    @property
    def tower_patterns(self) -> tuple[str, ...]:
        """Patterns of the names of all modules in towers, for `quantization_config`.

        vLLM names modules in towers differently from checkpoints, but not the towers.
        """
        return tuple(rf"re:(.*\.)?{re.escape(tower)}\..*" for tower in self.towers)

    def written_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor of the language model."""
        own, written = next(pair for pair in self.prefixes if name.startswith(pair[0]))
        return written + name.removeprefix(own)

    def own_name(self, name: str) -> str:
        """Return the language model's own name of a tensor of the checkpoint; "" of a tower's."""
        for own, written in self.prefixes:
            if name.startswith(written):
                return own + name.removeprefix(written)
        return ""

    def own_names(self, names: Collection[str]) -> dict[str, str]:
        """Return own name → the checkpoint's name of each tensor of the language model."""
        return {own: name for name in names if (own := self.own_name(name))}


def whole_of(config: PreTrainedConfig) -> Whole | None:
    """Return the checkpoint that a language model was loaded from, if it has towers beside it.

    None for other models, and for a configuration that was made in Python.
    """
    name = str(config.name_or_path or "")
    if not name:
        return None
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return read_whole(folder)
    try:
        settings, _ = PreTrainedConfig.get_config_dict(name, local_files_only=True)
    # the folder or the hub's copy is gone
    except (OSError, ValueError):
        return None
    return _whole(settings, [])


def read_whole(folder: Path) -> Whole | None:
    """Return the whole in a folder with a config.json; None if it has no towers."""
    return _read_whole(folder, (folder / "config.json").stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read_whole(folder: Path, written_at: int) -> Whole | None:
    """Return the whole in a folder; None if it has no towers.

    written_at: time of its config.json, of which the answer is remembered.
    """
    settings = json.loads((folder / "config.json").read_text())
    if not has_towers(settings):
        return None
    try:
        names = list(tensor_shapes(folder))
    # no weights yet: the skeleton of a model, or its config.json alone
    except ModelError:
        names = []
    return _whole(settings, names)


def has_towers(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a language model beside towers."""
    return bool(inputs_beside_text(settings))


def _whole(settings: Mapping[str, Any], names: Collection[str]) -> Whole | None:
    """Return the whole of these settings and names of tensors; None if it has no towers."""
    if not has_towers(settings):
        return None
    heads = [name.removesuffix(".weight") for name in names if name.endswith("lm_head.weight")]
    whole = Whole(settings, _prefix(names), heads[0] if len(heads) == 1 else _HEAD)
    beside = (name.removeprefix(_TEXT_PREFIX) for name in names if not whole.own_name(name))
    return replace(whole, towers=tuple(dict.fromkeys(name.split(".")[0] for name in beside)))


def _prefix(names: Collection[str]) -> str:
    """Return what stands before the language model's names, by the name of its embedding."""
    for ending in _EMBEDDINGS:
        prefixes = [
            name.removesuffix(ending) for name in names if f".{name}".endswith(f".{ending}")
        ]
        if len(prefixes) == 1:
            return prefixes[0]
    return _PREFIX


def language_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration of the language model alone of a model with towers.

    None if transformers has no class for it. Its output head is tied if the whole's is.
    """
    text = config.get_text_config()
    kind = _TEXT_CLASSES.get(text.model_type)
    if kind is None and not has_text_class(config):
        return None
    if kind is not None:
        settings = text.to_dict()
        settings.pop("model_type")
        text = getattr(transformers, kind)(**settings)
    text = copy.deepcopy(text)
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is not None:  # Mllama's whole has none
        text.tie_word_embeddings = bool(tied)
    text.name_or_path = config.name_or_path
    return text


def served_settings(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """Return the config.json by which vLLM runs a model: that of the whole if it is a part of one.

    Args:
        config: the configuration of the model that is trained.
        architecture: its class in transformers.
    """
    whole = whole_of(config)
    if whole is None:
        written = config.to_dict()
        # of parts, classes refuse what only the whole's class leaves out of its file (DBRX)
        for key, part in vars(config).items():
            if isinstance(part, PreTrainedConfig) and key in written:
                written[key] = part.to_diff_dict()
        served = _VLLM_CLASSES.get(architecture, architecture)
        return {**with_source_fields(written, config), "architectures": [served]}
    settings: dict[str, Any] = copy.deepcopy(dict(whole.settings))
    for level in levels_of(settings):
        level["tie_word_embeddings"] = bool(config.tie_word_embeddings)
    return settings


def processor_files(config: PreTrainedConfig) -> list[Path]:
    """Return the files of tokenizer and processors in the folder of the whole that a model is a
    part of; [] if it is a part of none, or from no folder.
    """
    folder = Path(str(config.name_or_path or "")).expanduser().resolve()
    if not (folder / "config.json").is_file() or read_whole(folder) is None:
        return []
    return [folder / name for name in COMPANIONS if (folder / name).is_file()]


def levels_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config.json, and its part for the language model if it is in one of its own."""
    text = settings.get("text_config")
    return [settings, text] if isinstance(text, dict) else [settings]
