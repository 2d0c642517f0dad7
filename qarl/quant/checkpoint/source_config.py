"""Fields of a model's config.json that transformers' class of its configuration drops.

transformers rewrites some fields when it reads a configuration (`rope_theta` becomes part of
`rope_parameters`, `full_attention_interval` becomes `layer_types`) and writes only the new ones.
vLLM, llama.cpp and earlier releases of transformers still read the old ones.
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

_WRITTEN_ANEW = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
}
"""Fields that describe the source's files or its writer, not the model."""


def with_source_fields(written: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config.json's settings with the fields that only the model's source has.

    A field is left out if transformers would read another configuration because of it, as after a
    change of `rope_parameters` in Python.

    Args:
        written: settings as transformers writes them, in full or as differences from defaults.
        config: the configuration. Its source is the folder or hub id it was loaded from, if that
            is at hand and still of the same model type; a configuration made in Python has none.
    """
    missing = {}
    for key, value in _source_of(config).items():
        own = written.get(key)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            # a class may have numbers as keys (`id2label`), which JSON has as text
            missing[key] = {**value, **{str(name): entry for name, entry in own.items()}}
        elif key not in written and key not in _WRITTEN_ANEW:
            missing[key] = value
    as_written = _reading(written, config)
    # together first, because some fields are read only beside others
    additions = [missing, *({key: value} for key, value in missing.items())]
    complete = dict(written)
    for addition in additions:
        if _reading({**complete, **addition}, config) == as_written:
            complete |= addition
    return complete


def _source_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of the config.json that a configuration was loaded from; {} if none.

    Of a model that also takes pictures these are its language model's, if that is what was loaded.
    """
    if not config.name_or_path:
        return {}
    try:
        settings, _ = PreTrainedConfig.get_config_dict(config.name_or_path, local_files_only=True)
    # the folder or the hub's copy is gone, or no config.json
    except (OSError, ValueError):
        return {}
    for level in (settings, settings.get("text_config")):
        if isinstance(level, dict) and level.get("model_type") == config.model_type:
            return level
    return {}


def _reading(settings: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return what transformers reads in these settings, without fields that it does not know.

    None if it refuses them.
    """
    known = config.to_dict().keys() - _WRITTEN_ANEW
    try:
        read = type(config).from_dict(copy.deepcopy(dict(settings))).to_dict()
    # classes check their fields in their own ways
    except Exception:
        return None
    return {key: read.get(key) for key in known}
