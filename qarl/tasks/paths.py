"""Makes the paths in a task's configuration absolute or relative.

They are absolute in a run's configuration, so that they are valid in any working folder. They are
relative to the folder in an export's note, because an export may be moved or published.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from qarl.configs.schema.task import TaskConfig
from qarl.tasks.rows import HUB, is_table

_FUNCTION_FILE = re.compile(r"(?P<before>(?:^|,)\s*)(?P<file>[^,:]+\.py):")
"""Matches each file in a list of functions, as in `mine.py:a=1, mine.py:b=0.2`.

Names of modules do not match, because they are no paths.
"""


def absolute(task: TaskConfig, base: Path) -> TaskConfig:
    """Return the task with absolute paths; relative ones are resolved in `base`."""
    return _with_paths(task, base, lambda path: os.path.abspath(base / path))


def relative(task: TaskConfig, base: Path) -> TaskConfig:
    """Return the task with absolute paths made relative to `base`, the inverse of `absolute`."""
    return _with_paths(
        task,
        base,
        lambda path: os.path.relpath(path, base) if os.path.isabs(path) else path,
    )


def absolute_function(spec: str, base: Path) -> str:
    """Return one function's name, or several, with absolute files.

    Names of modules stay as they are.
    """
    return _with_files(spec, lambda path: os.path.abspath(base / path))


def _with_paths(task: TaskConfig, base: Path, change: Callable[[str], str]) -> TaskConfig:
    update: dict[str, str | None] = {}
    for field in ("name", "data"):
        update[field] = _with_path(getattr(task, field), base, change)
    for field in ("reward", "correct", "rollout", "environment"):
        spec = getattr(task, field)
        update[field] = spec and _with_files(spec, change)
    return task.model_copy(update=update)


def _with_path(
    name: str | None,
    base: Path,
    change: Callable[[str], str],
) -> str | None:
    if name is None or not is_table(name):
        return name
    path = name.removeprefix(HUB)
    if not name.startswith(HUB):
        return change(path)
    # A name that is no folder is an id on the Hub.
    return f"{HUB}{change(path)}" if (base / path).is_dir() else name


def _with_files(spec: str, change: Callable[[str], str]) -> str:
    return _FUNCTION_FILE.sub(lambda match: f"{match['before']}{change(match['file'])}:", spec)
