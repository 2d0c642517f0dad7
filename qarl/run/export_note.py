"""The file of an export that describes it to programs: `qarl.json` names its run and step, and what
it was trained and measured on, so that `qarl eval` of the folder measures the same.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from qarl.configs.errors import ConfigError
from qarl.configs.load import config_from_tree
from qarl.configs.schema.run import RunConfig
from qarl.configs.schema.task import TaskConfig
from qarl.embedded.real_model import HUB_ID, REAL_LICENCE, REAL_MODEL
from qarl.quant.checkpoint.folder import file_digests
from qarl.quant.runtime.answers import versions
from qarl.report.run_folder import RunFolder
from qarl.rollout.types import RequestDefaults
from qarl.tasks.paths import absolute, relative

NAME = "qarl.json"
LIMITS = (
    "max_prompt_tokens",
    "max_new_tokens",
    "stop",
    "loop_limit",
    "max_num_seqs",
    "kv_cache_gib",
)
"""Fields of `rollout` on which an evaluation's figures depend."""
_LICENCE = ("license", "license_name", "license_link")


def export_note(
    run: Path, config: RunConfig, step: int, export: Path, base: Path | None = None
) -> dict[str, Any]:
    """Return the content of qarl.json for a run's step, except the digest of the tensors written.

    export: folder that it is for; the task's files are named relative to it. base: folder of the
    model that the run started with, whose card states a licence.
    """
    return {
        "run": run.resolve().name,
        "step": step,
        "base": _base_name(config.model),
        "licence": dict(REAL_LICENCE) if config.model == REAL_MODEL else _licence(base),
        "scheme": config.scheme,
        "layers": [str(rule) for rule in config.layers],
        "dtype": config.dtype,
        "kv_cache": config.quantization.kv_cache,
        "task": (
            relative(absolute(config.task, Path.cwd()), export.resolve()).model_dump(mode="json")
        ),
        "eval": config.eval.model_dump(mode="json", exclude={"every"}),
        **{key: getattr(config.rollout, key) for key in LIMITS},
        "versions": versions(),
    }


def _base_name(model: str) -> str:
    """Return an id on the Hub, or the name of an embedded policy or of a folder.

    A folder's path is nobody's business.
    """
    if Path(model).is_dir():
        return Path(model).name
    return HUB_ID if model == REAL_MODEL else model


def _licence(base: Path | None) -> dict[str, str]:
    """Return the licence in the front matter of a model's README.md, by the Hub's keys.

    The dictionary is empty if it states none.
    """
    card = base / "README.md" if base else None
    text = card.read_text(encoding="utf-8", errors="replace") if card and card.is_file() else ""
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    try:
        tree = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        return {}
    if not isinstance(tree, dict):
        return {}
    return {key: str(tree[key]) for key in _LICENCE if key in tree}


def noted_task(note: dict[str, Any], export: Path) -> TaskConfig:
    """Return the task of a note, with absolute paths of its files.

    Raises `ConfigError` if it is not a valid task.
    """
    return absolute(config_from_tree({"task": note["task"]}).task, export.resolve())


def noted_defaults(note: dict[str, Any]) -> RequestDefaults:
    """Return how the policy of a note was asked; the defaults if the note does not say."""
    defaults = dict(note.get("requests", {}))
    for name in ("end_tokens", "stop"):
        defaults[name] = tuple(defaults.get(name, ()))
    return RequestDefaults(**defaults)


def add_to_note(export: Path, **more: Any) -> None:
    """Add entries to qarl.json that became known after the export was written."""
    note = json.dumps({**read_note(export), **more}, indent=2)
    (export / NAME).write_text(note + "\n")


def changed_files(export: Path) -> list[str]:
    """Return the names of files that were changed, added or removed since the export was written.

    Weights are not among them: `qarl export --format gguf` compares those with their own digest.
    The list is empty for a folder without qarl.json, or of a version that noted no files.
    """
    written = read_note(export).get("files")
    if written is None:
        return []
    present = file_digests(export)
    names = {*written, *present}
    return sorted(name for name in names if written.get(name) != present.get(name))


def changes_in_words(export: Path) -> str | None:
    """Return what `changed_files` means for whoever uses the export; None if nothing changed."""
    changed = changed_files(export)
    if not changed:
        return None
    return (
        f"{', '.join(changed)} changed since the export was written, so its answers need not be"
        " those that were measured; `qarl eval` measures them as they are now"
    )


def read_note(export: Path) -> dict[str, Any]:
    """Return qarl.json of a folder, or {} if it has none.

    Raises `ConfigError` if the file cannot be read or lacks an entry.
    """
    file = export / NAME
    if not file.is_file():
        return {}
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(file)!r} cannot be read: {error}; export the run again, or remove that file and"
            " name task and limits yourself"
        ) from error
    needed = ("run", "step", "task", "eval", "dtype", *LIMITS)
    missing = [key for key in needed if key not in note] if isinstance(note, dict) else list(needed)
    if missing:
        raise ConfigError(
            f"{str(file)!r} lacks {missing[0]!r}; export the run again, or remove that file and"
            " name task and limits yourself"
        )
    return note


def find_export(target: Path) -> Path:
    """Return the folder of an export: `target` itself, or that of a run.

    Raises `ConfigError` if a run has none, or one that is older than its newest checkpoint.
    """
    if not (target / "config.yaml").is_file():
        if not target.is_dir():
            raise ConfigError(
                f"there is no folder {str(target)!r}; give a run folder, or a checkpoint that"
                " `qarl export` wrote"
            )
        return target
    folder = RunFolder(target)
    quoted = shlex.quote(str(target))
    remedy = f"write one (qarl export {quoted} -o DIR), and give DIR with --format gguf"
    if not folder.export.is_dir():
        raise ConfigError(f"run {str(target)!r} has no export; {remedy}")
    step = read_note(folder.export).get("step")
    newest = max(folder.steps(), default=step)
    if step != newest:
        raise ConfigError(
            f"the export of run {str(target)!r} is of step {step}, and its newest checkpoint of"
            f" step {newest}; {remedy}, or give {str(folder.export)!r} itself"
        )
    return folder.export


def is_finished(folder: RunFolder, config: RunConfig) -> bool:
    """Return whether a run has done all its steps and verified its export, if it is to have one."""
    if config.steps not in folder.steps():
        return False
    note = read_note(folder.export) if config.export else {}
    if not config.export:
        return True
    return note.get("step") == config.steps and note.get("verified", False)
