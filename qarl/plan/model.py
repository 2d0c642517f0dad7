"""A model's sizes before anything is loaded: from its config.json, wherever that is, or as they are published."""

from qarl.plan.shapes import EMBEDDED, NAMED, Shapes, shapes_of
from qarl.quant.checkpoint.folder import check_model, hub_file, local_folder, read_config

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
    return published or (shapes_of(read_config(hub_file(model).parent), model), "its config.json on the hub")


def _published(model: str) -> tuple[Shapes, str] | None:
    """Base, instruct and math models of a size are alike."""
    size = model.removeprefix(_PUBLISHER).lower()
    for part in ("-base", "-instruct", "-math"):
        size = size.replace(part, "")
    return (NAMED[size], "published sizes") if model.startswith(_PUBLISHER) and size in NAMED else None
