"""Instances of an environment class, one per conversation, each in a process of its own.

A tool that hangs or ends its process ends neither the run nor another conversation.
"""

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any
from weakref import WeakKeyDictionary

from qarl.rollout.coroutines import completed
from qarl.tasks.base import Failure, Problem, RewardError
from qarl.tasks.environment_host import RESET, REWARD, Call, Description
from qarl.tasks.signatures import too_long
from qarl.tasks.worker import Job
from qarl.tasks.workers import GRACE, Child

_AT_ONCE = 4 * (os.cpu_count() or 1)
"""Upper bound on calls that run at the same time. The time of a waiting call has not begun."""


class Environments:
    """The host process of an environment class.

    Raises `TaskError` if the class cannot be used.

    Args:
        spec: Name of the class, as configured.
        time_limit: Upper bound on a method's call, in seconds.
    """

    def __init__(self, spec: str, time_limit: float):
        self.time_limit = time_limit
        job = Job(
            word="environment",
            spec=spec,
            task="",
            time_limit=time_limit,
            path=tuple(sys.path),
        )
        self._host = Child(job, "qarl.tasks.environment_host")
        self.description: Description = self._host.start()
        self._lock = threading.Lock()
        self._turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    @property
    def judges(self) -> bool:
        """True if the class gives rewards itself."""
        return REWARD in self.description.methods

    def open(self) -> "Environment":
        """Create an instance. Raises `RewardError` if the host ends meanwhile."""
        pipe, child_end = Pipe()
        with child_end, self._lock:
            self._host.start()
            try:
                send_handle(self._host.pipe, child_end.fileno(), None)
                return Environment(pipe, self._host.pipe.recv(), self)
            except (EOFError, OSError):
                pipe.close()
                raise RewardError(
                    f"environment: its host ended ({self._host.ending()}); is memory short?"
                ) from None

    def opening(self, problem: Problem) -> str:
        """Return the text of `reset` at a problem, "" if there is none.

        Raises `RewardError` if `reset` fails.
        """

        async def reset() -> str:
            environment = self.open()
            try:
                return await environment.reset(problem)
            finally:
                environment.close()

        return completed(reset()) if RESET in self.description.methods else ""

    @property
    def turns(self) -> asyncio.Semaphore:
        """Semaphore of the running event loop, to be held while a method runs."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))


class Environment:
    """The instance of one conversation, in process `pid`."""

    def __init__(self, pipe: Connection, pid: int, environments: Environments):
        self._pipe = pipe
        self._pid = pid
        self._environments = environments
        self.lost: str | None = None
        """Why the instance is gone, or None."""

    async def reset(self, problem: Problem) -> str:
        """Begin a problem and return the text of the class's `reset`, "" if there is none.

        Raises `RewardError` if it fails.
        """
        if RESET not in self._environments.description.methods:
            return ""
        row = {
            "question": problem.question,
            "answer": problem.answer,
            "prompt": problem.chat,
            **problem.metadata,
        }
        outcome = await self.call(RESET, row, problem.id)
        if isinstance(outcome, Failure):
            raise RewardError(f"environment: reset of problem {problem.id!r} {outcome.words}")
        return outcome or ""

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        seed: str,
    ) -> Any:
        """Call a method and return its outcome, text for tools, or a `Failure`.

        After a call that takes too long, or ends its process, the instance is gone, and further
        calls fail with the same reason.
        """
        time_limit = self._environments.time_limit
        async with self._environments.turns:
            if self.lost is None:
                try:
                    self._pipe.send(Call(name, dict(arguments), seed))
                    await readable(self._pipe, time_limit + GRACE)
                    return self._pipe.recv()
                except TimeoutError:
                    self.lost = too_long(time_limit)
                except (EOFError, OSError):
                    self.lost = "ended its process"
                self.close()
            return Failure(f"{self.lost}; the environment is gone")

    def close(self) -> None:
        """Kill the instance's process and the processes that it started.

        Does so only once, because the process number may belong to another process afterwards.
        """
        if self._pipe.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._pipe.close()


async def readable(pipe: Connection, seconds: float) -> None:
    """Wait until a pipe has data. Raises `TimeoutError` after `seconds`."""
    loop = asyncio.get_running_loop()
    fd = pipe.fileno()
    answered = asyncio.Event()
    loop.add_reader(fd, answered.set)
    try:
        # Wait in ten parts: the loop blocks while turns are sampled, which then uses up at most
        # one part of the time.
        for _ in range(10):
            with suppress(TimeoutError):
                await asyncio.wait_for(answered.wait(), seconds / 10)
                return
        raise TimeoutError
    finally:
        loop.remove_reader(fd)


@functools.cache
def open_environments(spec: str, time_limit: float) -> Environments:
    """Return this process's host of a class, started on first use.

    Raises `TaskError` if the class cannot be used.
    """
    return Environments(spec, time_limit)
