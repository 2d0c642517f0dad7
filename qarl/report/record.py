"""What a benchmark's `--json` writes: its figures, and all that a reader needs to measure them
again.
"""

import shlex
import subprocess
from pathlib import Path
from typing import Any

from qarl.report.run_folder import describe_environment

_ROOT = Path(__file__).resolve().parents[2]
_FILES = ("--json", "--plot", "--picture")


def record(arguments: list[str], data: Any, program: str = "qarl") -> dict[str, Any]:
    """command, commit ("… with changes" where files differ from it; None outside a checkout),
    machine and versions, data: the benchmark's own. arguments: of `program`; where it wrote to
    (`--json`, `--plot`, `--picture`) is left out.
    """
    return {
        "command": f"{program} {shlex.join(_without_files(arguments))}",
        "commit": _commit(),
        "environment": describe_environment(),
        "data": data,
    }


def _without_files(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in _FILES:
            kept.append(argument)
        skip = argument in _FILES
    return kept


def _commit() -> str | None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
