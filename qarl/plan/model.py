"""A model's sizes before anything is loaded: from its config.json, wherever that is, or as they are published."""

import json
from pathlib import Path

from qarl.configs.errors import ModelError
from qarl.configs.hub import hub_or_cache
from qarl.plan.shapes import EMBEDDED, NAMED, Shapes, shapes_of
from qarl.quant.checkpoint.folder import check_model, local_folder, read_config

_PUBLISHER = "Qwen/"


def sizes_of(model: str) -> tuple[Shapes, str]:
    """Sizes, and where they come from in words. model: as `RunConfig.model`, or a name of `NAMED`.

    A hub id's config.json is taken from the hub's cache or downloaded; the published sizes of Qwen's models are known.
    Raises `ModelError` where there is no config.json, and `ConfigError` for one that is not counted (`shapes_of`).
    """
    if model.lower() in NAMED:
        return NAMED[model.lower()], "published sizes"
    if model in EMBEDDED:
        return EMBEDDED[model], "its recipe"
    folder = local_folder(model)
    if folder is not None:
        check_model(folder)
        return shapes_of(read_config(folder), model), "its config.json"
    published = _published(model)
    return published if published else (_from_hub(model), "its config.json on the hub")


def _published(model: str) -> tuple[Shapes, str] | None:
    """Base, instruct and math models of a size are alike."""
    size = model.removeprefix(_PUBLISHER).lower()
    for part in ("-base", "-instruct", "-math"):
        size = size.replace(part, "")
    return (NAMED[size], "published sizes") if model.startswith(_PUBLISHER) and size in NAMED else None


def _from_hub(model: str) -> Shapes:
    from huggingface_hub import hf_hub_download

    try:
        with hub_or_cache():
            file = hf_hub_download(model, "config.json")
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"model {model!r} is no folder here, and its config.json could not be had from the hub: {lines[0]}; check "
            "the path or the id, the network (HF_ENDPOINT for a mirror, HF_HOME for a cache filled elsewhere), and "
            "HF_TOKEN for gated models"
        ) from error
    return shapes_of(config, model)
