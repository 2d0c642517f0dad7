"""Functions run in child processes, timed: what takes too long or ends its process is a `Failure`,
never a hung run.
"""

import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from qarl.tasks.base import Failure, Response, TaskError
from qarl.tasks.signatures import too_long
from qarl.tasks.worker import Job

_STARTUP = 300.0
"""Seconds for a reward's own imports, which may be large libraries."""
GRACE = 5.0
"""Seconds that a function which keeps its own time is given beyond its limit."""


class Child:
    """A child process that serves a job; begun by `start`, and again after it ended. module: whose
    `serve` it runs.
    """

    def __init__(self, job: Job, module: str = "qarl.tasks.worker"):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # a pipe a conversation, of which 1,024 are soon open
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.job = job
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._reply: Any = None
        self._living: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _kill, self._living)

    @property
    def pipe(self) -> Connection:
        """To the child, once it was started."""
        assert self._pipe is not None
        return self._pipe

    def start(self) -> Any:
        """Begin the child where none lives, and load the function in it; what it answers to its
        job.

        Raises:
            TaskError: the function cannot be found, its module raises, or its parameters are of no
            known kind.
        """
        if self._process is not None and self._process.poll() is None:
            return self._reply
        _kill(self._living)  # what a function that ended its process had started
        self._pipe, theirs = Pipe()
        code = f"from {self._module} import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            # One thread, unless the user says otherwise: the learner's own are at work beside it.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        self._living[:] = [self._process]
        theirs.close()
        what = f"{self.job.word} {self.job.spec!r}"
        try:
            self._pipe.send(self.job)
            reply = self._pipe.recv() if self._pipe.poll(_STARTUP) else None
        except (EOFError, OSError):
            raise TaskError(f"{what}: importing it ended its process ({self.ending()})") from None
        if reply is None:
            self.stop()
            raise TaskError(
                f"{what}: importing it took longer than {_STARTUP:g} s; import less, or lazily"
            )
        if isinstance(reply, str):
            self.stop()
            raise TaskError(reply)
        self._reply = reply
        return reply

    def ending(self) -> str:
        """How the child that closed its pipe ended."""
        assert self._process is not None
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.stop()
            return "it closed its pipe"
        limited = (
            f" under task.memory_limit {self.job.memory_limit:g} GiB"
            if self.job.memory_limit
            else ""
        )
        return (f"signal {-code}" if code < 0 else f"exit status {code}") + limited

    def end(self) -> None:
        """Let the child end by itself, as it does without its pipe, and `stop` it where it does
        not.
        """
        if self._process is not None:
            self.pipe.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            self.stop()

    def stop(self) -> None:
        """End the child, whatever it does, and what the function started."""
        _kill(self._living)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
        self._living.clear()


class Worker(Child):
    """A child with a job's function; `start` says whether its outcomes come one by one.

    goes_on: whether a response that the function hangs or ends its process at leaves the others to
    be judged; else they fail with it, at once.
    """

    def __init__(self, job: Job, goes_on: bool = False):
        super().__init__(job)
        self._goes_on = goes_on

    def outcomes(self, responses: Sequence[Response]) -> list[Any]:
        """What the function says of each, in order. What is not done in time, or ends its process,
        is a `Failure`.
        """
        results: list[Any] = []
        while len(results) < len(responses):
            results += self._outcomes(responses[len(results) :], self.start())
        return results

    def _outcomes(self, responses: Sequence[Response], one_by_one: bool) -> list[Any]:
        """All of them, or until one that ended the child, that one included."""
        limit = self.job.time_limit if one_by_one else self.job.time_limit + GRACE
        results: list[Any] = []
        try:
            self.pipe.send(list(responses))
            while len(results) < len(responses):
                if not self.pipe.poll(limit):
                    self.stop()
                    words = too_long(self.job.time_limit)
                    break
                results.append(self.pipe.recv())
            else:
                return results
        except (EOFError, OSError):
            words = f"ended its process ({self.ending()})"
        failed = 1 if one_by_one and self._goes_on else len(responses) - len(results)
        return results + [Failure(words)] * failed


class Workers:
    """Several children for one function free of state: each has a share of the responses. goes_on:
    see `Worker`.
    """

    def __init__(self, job: Job, count: int = 1, goes_on: bool = False):
        self._workers = [Worker(job, goes_on) for _ in range(count)]

    def check(self) -> None:
        """Raise `TaskError` where the function cannot be used."""
        self._workers[0].start()

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        """A `Scorer`: what the function says of each response."""
        count = min(len(self._workers), len(responses))
        if count <= 1:
            return self._workers[0].outcomes(responses)
        results: list[Any] = [None] * len(responses)
        with ThreadPoolExecutor(count) as threads:
            shares = threads.map(
                lambda n: self._workers[n].outcomes(responses[n::count]), range(count)
            )
            for number, share in enumerate(shares):
                results[number::count] = share
        return results


def _kill(living: list[subprocess.Popen[bytes]]) -> None:
    for process in living:
        with process, suppress(ProcessLookupError):  # all of its session are gone
            os.killpg(process.pid, signal.SIGKILL)
