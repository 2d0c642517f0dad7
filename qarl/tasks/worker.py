"""The child process in which a person's reward runs, so that one that hangs or ends its process
ends no run.

    python -c "from qarl.tasks.worker import serve; serve(FD)"          (see `qarl.tasks.workers`)

Over the pipe comes one `Job`, answered by whether outcomes are sent as they come, so that each is
timed on its own, or in words by why the function cannot be used; and then lists of responses, each
answered by an outcome a response.
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

from qarl.tasks.base import Failure, TaskError
from qarl.tasks.signatures import call_one_by_one, load_judge, outcomes


@dataclass(frozen=True)
class Job:
    """word: "reward", "checker" or "environment", for messages. spec: what names the function or
    class. task: the task's name. time_limit: seconds for a call. path: the parent's sys.path.
    options: of an environment of verifiers, or more arguments of the function. memory_limit: GiB
    each of its processes may allocate, None for any number.
    """

    word: str
    spec: str
    task: str
    time_limit: float
    path: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    memory_limit: float | None = None


def serve(fd: int) -> None:
    """The child's whole life: until the parent closes the pipe, or is gone."""
    try:
        connection, job = begin(fd)
        try:
            kind, function = load_judge(job.word, job.spec)
        except TaskError as error:
            return connection.send(str(error))
        connection.send(call_one_by_one(kind, function))
        function = partial(function, **job.options)
        while True:
            for outcome in outcomes(kind, function, job.task, connection.recv(), job.time_limit):
                connection.send(sendable(outcome))
    except (EOFError, OSError):
        return None


def begin(fd: int) -> tuple[Connection, Job]:
    """Take over the parent's pipes and its job."""
    end_with(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    connection = Connection(fd)
    # Ctrl-C is the parent's to decide about
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the function prints goes beside the run's output, not into it
    job: Job = connection.recv()
    sys.path[:] = job.path
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # where the machine's memory is short, this process ends and not the learner
        file.write("1000")
    if job.memory_limit is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        size = min(int(job.memory_limit * 2**30), most if most > 0 else sys.maxsize)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))
    return connection, job


def sendable(outcome: Any) -> Any:
    """Numbers of numpy, torch and enumerations as Python's, and what is not Python's own as
    words.
    """
    if hasattr(outcome, "item") and getattr(outcome, "shape", None) == ():
        outcome = outcome.item()
    if isinstance(outcome, int | float) and not isinstance(outcome, bool):
        return outcome + 0
    with suppress(ValueError):
        if not isinstance(outcome, Failure):
            # the parent has none of the classes that a person's module defines
            marshal.dumps(outcome)
        return outcome
    return Failure(f"returned {outcome!r:.80} ({type(outcome).__name__}), which is no number")


def end_with(pipe: int) -> None:
    """Have the system end this process, and what the function starts, once nobody can write into a
    pipe any more: the parent was killed. A thread that looks would wait for code in C, such as a
    regular expression's, as all Python does.
    """
    # which is this process's alone
    life = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
