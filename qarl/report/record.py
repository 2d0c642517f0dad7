"""The record that a benchmark's `--json` writes: its figures, and how to measure them again."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

from qarl.report.run_folder import describe_environment

_ROOT = Path(__file__).resolve().parents[2]
_FILES = ("--json", "--plot", "--picture")


def record(
    arguments: list[str],
    data: Any,
    program: str = "qarl",
) -> dict[str, Any]:
    """Return the record of a benchmark, a dictionary for JSON.

    It has the command, the commit, the machine with versions, and the data. The commit reads
    "… with changes" if files differ from it, and is None outside a checkout.

    arguments: arguments of `program`. Options that name output files (`--json`, `--plot`,
    `--picture`) are left out of the command.
    """
    return {
        "command": f"{program} {shlex.join(_without_files(arguments))}".rstrip(),
        "commit": _commit(),
        "environment": describe_environment(),
        "data": data,
    }


def _without_files(arguments: list[str]) -> list[str]:
    """Return the arguments without the options in `_FILES` and their values."""
    remaining: list[str] = []
    skip = False  # whether the next argument is the value of such an option
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in _FILES:
            remaining.append(argument)
        skip = argument in _FILES
    return remaining


def _commit() -> str | None:
    """Return the checkout's commit, or None if this is no checkout or git is missing."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
