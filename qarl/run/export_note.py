"""`qarl.json` in an export: which run and step it is, and what it was trained and measured on, so that `qarl eval` of
the folder measures the same."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.load import config_from_tree
from configs.schema.run import RunConfig
from configs.schema.task import TaskConfig
from qarl.tasks.paths import absolute, relative

NAME = "qarl.json"
LIMITS = ("max_prompt_tokens", "max_new_tokens", "max_num_seqs", "kv_cache_gib")
"""Fields of `rollout` that an engine is started with for the same figures."""


def export_note(run: Path, config: RunConfig, step: int, export: Path) -> dict[str, Any]:
    """What qarl.json says of a run's step, besides the digest of what was written. export: the folder it is for, from
    which the task's files are named."""
    return {
        "qarl": version("qarl"),
        "run": run.resolve().name,
        "step": step,
        "model": config.model,
        "scheme": config.scheme,
        "layers": [str(rule) for rule in config.layers],
        "dtype": config.dtype,
        "task": relative(absolute(config.task, Path.cwd()), export.resolve()).model_dump(mode="json"),
        "eval": config.eval.model_dump(mode="json", exclude={"every"}),
        **{key: getattr(config.rollout, key) for key in LIMITS},
    }


def noted_task(note: dict[str, Any], export: Path) -> TaskConfig:
    """The task of a note, its files found from any folder. Raises `ConfigError` for one that is none."""
    return absolute(config_from_tree({"task": note["task"]}).task, export.resolve())


def add_to_note(export: Path, **more: Any) -> None:
    """Add what became known after the export was written."""
    (export / NAME).write_text(json.dumps({**read_note(export), **more}, indent=2) + "\n")


def read_note(export: Path) -> dict[str, Any]:
    """qarl.json of a folder; {} where it has none. Raises `ConfigError` for one that cannot be read."""
    file = export / NAME
    if not file.is_file():
        return {}
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read: {error}; export the run again, or remove that file"
        ) from error
    needed = ("task", "eval", "dtype", *LIMITS)
    missing = [key for key in needed if key not in note] if isinstance(note, dict) else list(needed)
    if missing:
        raise ConfigError(f"{str(file)!r} lacks {missing[0]!r}; export the run again, or remove that file")
    return note
