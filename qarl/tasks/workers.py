"""Functions run in child processes, timed: what takes too long or ends its process is a `Failure`, never a hung run."""

import os
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
_GRACE = 5.0
"""Seconds that a function which keeps its own time is given beyond its limit."""


class Worker:
    """One child process with a job's function; begun at the first use and again after it ended.

    goes_on: whether a response that the function hangs or ends its process at leaves the others to be judged; else
    they fail with it, at once.
    """

    def __init__(self, job: Job, goes_on: bool = False):
        self.job = job
        self._goes_on = goes_on
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._one_by_one = True
        self._living: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _kill, self._living)

    def start(self) -> None:
        """Begin the child, and load the function in it.

        Raises:
            TaskError: the function cannot be found, its module raises, or its parameters are of no known kind.
        """
        if self._process is not None and self._process.poll() is None:
            return
        _kill(self._living)  # what a function that ended its process had started
        self._pipe, theirs = Pipe()
        code = f"from qarl.tasks.worker import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env=_environment(), start_new_session=True,
        )  # fmt: skip
        self._living[:] = [self._process]
        theirs.close()
        what = f"{self.job.word} {self.job.spec!r}"
        try:
            self._pipe.send(self.job)
            reply = self._pipe.recv() if self._pipe.poll(_STARTUP) else None
        except (EOFError, OSError):
            raise TaskError(f"{what}: importing it ended its process ({self._ending()})") from None
        if reply is None:
            self.stop()
            raise TaskError(f"{what}: importing it took longer than {_STARTUP:g} s; import less, or lazily")
        if isinstance(reply, str):
            self.stop()
            raise TaskError(reply)
        self._one_by_one = reply

    def outcomes(self, responses: Sequence[Response]) -> list[Any]:
        """What the function says of each, in order. What it is not done with in time, and what it ends its process at,
        is a `Failure`."""
        results: list[Any] = []
        while len(results) < len(responses):
            self.start()
            results += self._outcomes(responses[len(results) :])
        return results

    def _outcomes(self, responses: Sequence[Response]) -> list[Any]:
        """All of them, or until one that ended the child, that one included."""
        assert self._pipe is not None
        limit = self.job.time_limit if self._one_by_one else self.job.time_limit + _GRACE
        results: list[Any] = []
        try:
            self._pipe.send(list(responses))
            while len(results) < len(responses):
                if not self._pipe.poll(limit):
                    self.stop()
                    words = too_long(self.job.time_limit)
                    return results + self._failed(words, responses[len(results) :])
                results.append(self._pipe.recv())
        except (EOFError, OSError):
            words = f"ended its process ({self._ending()})"
            return results + self._failed(words, responses[len(results) :])
        return results

    def _failed(self, words: str, responses: Sequence[Response]) -> list[Any]:
        return [Failure(words)] * (1 if self._one_by_one and self._goes_on else len(responses))

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.stop()
            return "it closed its pipe"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def stop(self) -> None:
        """End the child, whatever it does, and what the function started."""
        _kill(self._living)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
        self._living.clear()


class Workers:
    """Several children for one function, which then must be free of state: each has a share of the responses.
    goes_on: see `Worker`."""

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
            shares = threads.map(lambda n: self._workers[n].outcomes(responses[n::count]), range(count))
            for number, share in enumerate(shares):
                results[number::count] = share
        return results


def _environment() -> dict[str, str]:
    """One thread a child, unless the user says otherwise: the learner's own are at work beside it."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _kill(living: list[subprocess.Popen[bytes]]) -> None:
    for process in living:
        with suppress(ProcessLookupError):  # all of its session are gone
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
