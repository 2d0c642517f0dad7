"""The child process that runs a person's reward, which may hang or crash without ending the run.

    python -c "from qarl.tasks.worker import serve; serve(FD)"          (see `qarl.tasks.workers`)

The parent first sends one `Job`. The reply is True, or a text that says why the function cannot be
used. Then the parent sends lists of responses, and the child answers each list with one outcome per
response. The parent times every outcome on its own, those after a `Together` all at once.
"""

import fcntl
import marshal
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from qarl.quant.runtime.parent import leave_stop_signals_to_the_parent
from qarl.tasks.base import Failure, TaskError
from qarl.tasks.rewards import attempt
from qarl.tasks.signatures import Together, load_judge, outcomes


@dataclass(frozen=True)
class Job:
    """The work that a child process is started for."""

    word: str
    """"reward", "checker", "environment" or "task", for messages."""
    spec: str
    """Name of the function or class, as configured."""
    task: str
    """Name of the task."""
    time_limit: float
    """Upper bound on a call, in seconds."""
    path: tuple[str, ...]
    """The parent's sys.path."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of an environment of verifiers, or further arguments of the function."""
    memory_limit: float | None = None
    """GiB that each of its processes may allocate; None for no limit."""


def serve(fd: int) -> None:
    """Run the child until the parent closes the pipe or ends."""
    try:
        connection, job = begin(fd)
        try:
            kind, function = load_judge(job.word, job.spec)
        except TaskError as error:
            return connection.send(str(error))
        connection.send(True)
        function = partial(function, **job.options)
        while True:
            for outcome in outcomes(kind, function, job.task, connection.recv(), job.time_limit):
                connection.send(sendable(outcome))
    except (EOFError, OSError):
        return None


def begin(fd: int) -> tuple[Connection, Job]:
    """Take over the parent's pipes and receive its job."""
    end_with(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    connection = Connection(fd)
    leave_stop_signals_to_the_parent()
    os.dup2(2, 1)  # what the function prints must not mix with the run's output
    job: Job = connection.recv()
    sys.path[:] = job.path
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # If the machine runs out of memory, the system kills this process, not the learner.
        file.write("1000")
    if job.memory_limit is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        upper_bound = hard_limit if hard_limit > 0 else sys.maxsize  # -1 means no limit
        size = min(int(job.memory_limit * 2**30), upper_bound)
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard_limit))
    return connection, job


def sendable(outcome: Any) -> Any:
    """Convert an outcome to built-in types, which the parent can unpickle.

    Scalars of numpy and torch, arrays of one element and enumerations become Python's numbers.
    Anything else that is not built-in becomes a `Failure`.
    """
    if hasattr(outcome, "item") and {*getattr(outcome, "shape", (0,))} <= {1}:
        outcome = attempt(outcome.item)
    if isinstance(outcome, int | float) and not isinstance(outcome, bool):
        return outcome + 0
    with suppress(ValueError):
        if not isinstance(outcome, Failure | Together):
            # marshal refuses classes of a person's module, which the parent could not unpickle.
            marshal.dumps(outcome)
        return outcome
    return Failure(f"returned {outcome!r:.80} ({type(outcome).__name__}), which is not a number")


def end_with(pipe: int) -> None:
    """Let the system kill this process group once nobody can write into a pipe any more.

    That is the case when the parent was killed. A thread that watches the pipe would not do: like
    all Python code it waits for C code, such as a regular expression's.
    """
    # Opening the pipe anew gives this process flags and an owner of its own.
    parent_alive = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(parent_alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(parent_alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent_alive, fcntl.F_SETFL, os.O_ASYNC)
