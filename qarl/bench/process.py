"""Measurements in a separate process, which answers by one marked line of JSON among the output of
libraries. Imports neither torch nor vLLM.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import qarl
from qarl.configs.errors import QarlError

T = TypeVar("T")

_MARK = "QARL-ANSWER "
"""Beginning of the line with the answer."""
_LINES = 12
"""Lines of a failed process's output that its error shows."""


class WorkerError(QarlError, heading="bench"):
    """Raised if a process that measures fails, or measures something else."""


def answer_line(answer: Any) -> str:
    """Return the text that a process prints to answer. answer: a dataclass of JSON's types."""
    return f"\n{_MARK}{json.dumps(dataclasses.asdict(answer))}\n"


def last_answer(output: str) -> Any:
    """Return the last answer's JSON in a process's output, or None if there is none."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK)) if lines else None


def run_worker(
    module: str,
    argument: str,
    parse: Callable[[Any], T],
    what: str,
    python: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> T:
    """Run `python -m module argument` and return its answer, as `parse` reads its JSON.

    python: interpreter of another environment, which finds this package by PYTHONPATH. Default:
    this process's. environment: variables to set in addition to this process's. what: name of the
    process for the message. Raises `WorkerError` if the process fails, with the end of its output.
    """
    assert qarl.__file__ is not None
    ours = {
        "PYTHONPATH": str(Path(qarl.__file__).parent.parent),
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    command = [str(python or sys.executable), "-m", module, argument]
    variables = {**os.environ, **ours, **(environment or {})}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    answer = last_answer(ended.stdout)
    if ended.returncode or answer is None:
        lines = (ended.stderr.strip() or ended.stdout.strip()).splitlines()
        end = "\n".join(lines[-_LINES:])
        raise WorkerError(f"{what} ended with status {ended.returncode}:\n{end}")
    return parse(answer)
