"""Files and folders that a task names: absolute in a run's configuration, so that it is found again
from any working folder, and relative to the folder in an export's note, which may be moved or
published.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from qarl.configs.schema.task import TaskConfig
from qarl.tasks.rows import HUB, is_table

_FUNCTION_FILE = re.compile(r"(?P<before>(?:^|,)\s*)(?P<file>[^,:]+\.py):")
"""In one function or several: `mine.py:a=1, mine.py:b=0.2`. A module's name is no path."""


def absolute(task: TaskConfig, base: Path) -> TaskConfig:
    """With every path absolute; a relative one is looked for in `base`."""
    return _with_paths(task, base, lambda path: os.path.abspath(base / path))


def relative(task: TaskConfig, base: Path) -> TaskConfig:
    """With every absolute path relative to `base`; the inverse of `absolute`."""
    return _with_paths(
        task,
        base,
        lambda path: os.path.relpath(path, base) if os.path.isabs(path) else path,
    )


def absolute_function(spec: str, base: Path) -> str:
    """A function, or several, by absolute files; modules stay."""
    return _with_files(spec, lambda path: os.path.abspath(base / path))


def _with_paths(task: TaskConfig, base: Path, change: Callable[[str], str]) -> TaskConfig:
    questions = {field: _place(getattr(task, field), base, change) for field in ("name", "data")}
    specs = {
        field: getattr(task, field) for field in ("reward", "correct", "rollout", "environment")
    }
    functions = {field: spec and _with_files(spec, change) for field, spec in specs.items()}
    return task.model_copy(update=questions | functions)


def _place(name: str | None, base: Path, change: Callable[[str], str]) -> str | None:
    if name is None or not is_table(name):
        return name
    path = name.removeprefix(HUB)
    if not name.startswith(HUB):
        return change(path)
    # else it is an id
    return f"{HUB}{change(path)}" if (base / path).is_dir() else name


def _with_files(spec: str, change: Callable[[str], str]) -> str:
    return _FUNCTION_FILE.sub(lambda match: f"{match['before']}{change(match['file'])}:", spec)
