"""Runs functions in child processes with a time limit.

A call that takes too long or ends its process becomes a `Failure`, and never hangs the run.
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
from qarl.tasks.signatures import Together, too_long
from qarl.tasks.worker import Job

_STARTUP = 300.0
"""Timeout in seconds for a reward's own imports, which may be large libraries."""
GRACE = 5.0
"""Seconds beyond its limit for a function that measures its own time."""


class Child:
    """A child process that serves a job. `start` starts it, and restarts it after it ended.

    module: the module whose `serve` the child runs.
    """

    def __init__(self, job: Job, module: str = "qarl.tasks.worker"):
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each conversation has a pipe, and the usual limit of 1,024 files is soon reached.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        self.job = job
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._reply: Any = None
        # One process or none: a list, which the finalizer can share without a reference to `self`.
        self._running: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _kill, self._running)

    @property
    def pipe(self) -> Connection:
        """Pipe to the child. Available once it was started."""
        assert self._pipe is not None
        return self._pipe

    def start(self) -> Any:
        """Start the child unless it is running, and return its reply to the job.

        Raises:
            TaskError: The function cannot be found, its module raises, or its parameters are of no
                known kind.
        """
        if self._process is not None and self._process.poll() is None:
            return self._reply
        # A function that ended its process may have started others.
        _kill(self._running)
        self._pipe, child_end = Pipe()
        code = f"from {self._module} import serve; serve({child_end.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.PIPE,
            # One thread by default, because the learner's threads run at the same time.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        self._running[:] = [self._process]
        child_end.close()
        function = f"{self.job.word} {self.job.spec!r}"
        try:
            self._pipe.send(self.job)
            reply = self._pipe.recv() if self._pipe.poll(_STARTUP) else None
        except (EOFError, OSError):
            raise TaskError(
                f"{function}: importing it ended its process ({self.ending()})"
            ) from None
        if reply is None:
            self.stop()
            raise TaskError(
                f"{function}: importing it took longer than {_STARTUP:g} s; import less, or lazily"
            )
        if isinstance(reply, str):
            self.stop()
            raise TaskError(reply)
        self._reply = reply
        return reply

    def ending(self) -> str:
        """Return how the child that closed its pipe ended."""
        assert self._process is not None
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.stop()
            return "it closed its pipe"
        status = f"signal {-code}" if code < 0 else f"exit status {code}"
        if not self.job.memory_limit:
            return status
        return f"{status} under task.memory_limit {self.job.memory_limit:g} GiB"

    def end(self) -> None:
        """Close the pipe, which ends the child, and `stop` the child if it does not end."""
        if self._process is not None:
            self.pipe.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            self.stop()

    def stop(self) -> None:
        """Kill the child and every process that the function started."""
        _kill(self._running)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
        self._running.clear()


class Worker(Child):
    """A child with a job's function.

    goes_on: whether the other responses are still judged after one at which the function hangs or
    ends its process. Otherwise all of them fail at once.
    """

    def __init__(self, job: Job, goes_on: bool = False):
        super().__init__(job)
        self._goes_on = goes_on

    def outcomes(self, responses: Sequence[Response]) -> list[Any]:
        """Return the function's outcome of each response, in order.

        A call that takes too long, or ends its process, gives a `Failure`.
        """
        results: list[Any] = []
        while len(results) < len(responses):
            self.start()
            results += self._outcomes(responses[len(results) :])
        return results

    def _outcomes(self, responses: Sequence[Response]) -> list[Any]:
        """Return the outcomes of all responses, or of those up to the one that ended the child."""
        limit = self.job.time_limit
        together = False
        results: list[Any] = []
        try:
            self.pipe.send(list(responses))
            while len(results) < len(responses):
                if not self.pipe.poll(limit):
                    self.stop()
                    words = too_long(self.job.time_limit)
                    break
                outcome = self.pipe.recv()
                if isinstance(outcome, Together):
                    # What is awaited measures its own time, so the parent waits a little longer.
                    together = True
                    limit = self.job.time_limit + GRACE
                else:
                    results.append(outcome)
            else:
                return results
        except (EOFError, OSError):
            words = f"ended its process ({self.ending()})"
        failed = 1 if self._goes_on and not together else len(responses) - len(results)
        return results + [Failure(words)] * failed


class Workers:
    """Several children for one stateless function; each gets a share of the responses.

    goes_on: see `Worker`.
    """

    def __init__(self, job: Job, count: int = 1, goes_on: bool = False):
        self._workers = [Worker(job, goes_on) for _ in range(count)]

    def check(self) -> None:
        """Raise `TaskError` if the function cannot be used."""
        self._workers[0].start()

    def __call__(self, responses: Sequence[Response]) -> list[Any]:
        """Return the function's outcome of each response, as a `Scorer`."""
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


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with process, suppress(ProcessLookupError):  # its whole session may have ended
            os.killpg(process.pid, signal.SIGKILL)
