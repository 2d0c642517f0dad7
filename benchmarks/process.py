"""What a benchmark measures, each in a process of its own, whose answer is one marked line of JSON among what libraries
print. Imports nothing heavy."""

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


class WorkerError(QarlError):
    """A trainer's process failed, or trained on something else."""

    heading = "bench"


def answer_line(answer: Any) -> str:
    """What a worker prints. answer: a dataclass of what JSON holds."""
    return f"\n{_MARK}{json.dumps(dataclasses.asdict(answer))}\n"


def last_answer(output: str) -> Any:
    """The last answer's JSON in a worker's output; None without one."""
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
    """The answer of `python -m module argument`, as `parse` reads its JSON. python: this one unless another
    environment's; that finds this package, and nothing else of ours, by PYTHONPATH. environment: variables besides.

    Raises `WorkerError`, naming `what` ran, with the end of what it printed.
    """
    assert qarl.__file__ is not None
    ours = {"PYTHONPATH": str(Path(qarl.__file__).parent.parent), "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [str(python or sys.executable), "-m", module, argument]
    variables = {**os.environ, **ours, **(environment or {})}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    answer = last_answer(ended.stdout)
    if ended.returncode or answer is None:
        said = "\n".join((ended.stderr.strip() or ended.stdout.strip()).splitlines()[-12:])
        raise WorkerError(f"{what} ended with status {ended.returncode}:\n{said}")
    return parse(answer)
