"""A benchmark's processes: one after the other, each of which prints its answer as a line of JSON."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import qarl
from configs.errors import QarlError


class BenchError(QarlError):
    """A benchmark's process failed, or did something else than it was asked."""

    heading = "bench"


def run_process(command: Sequence[str], who: str, more: Mapping[str, str] | None = None) -> str:
    """Run to its end and return what it printed. It finds `qarl.bench` by PYTHONPATH, whatever its interpreter. more:
    environment variables besides this process's.

    Raises `BenchError` with its last lines where it fails; who: the process, for that message.
    """
    assert qarl.__file__ is not None
    environment = {**os.environ, "PYTHONPATH": str(Path(qarl.__file__).parent.parent), **(more or {})}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchError(f"{who} ended with status {ended.returncode}:\n{last_lines(ended.stderr, ended.stdout)}")
    return ended.stdout


def last_lines(errors: str, output: str) -> str:
    """Of a process: those of its errors, or of its output where it told none."""
    return "\n".join((errors.strip() or output.strip()).splitlines()[-12:])
