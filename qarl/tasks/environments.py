"""An environment class, an instance a conversation, each in a process of its own: a tool that hangs
or ends its process ends no run, and no other conversation.
"""

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from qarl.tasks.base import Failure, Problem, RewardError
from qarl.tasks.environment_host import RESET, REWARD, Call, Description
from qarl.tasks.signatures import too_long
from qarl.tasks.worker import Job
from qarl.tasks.workers import GRACE, Child

Result = TypeVar("Result")

_AT_ONCE = 4 * (os.cpu_count() or 1)
"""Calls that run together; the others wait, and their time has not begun."""


class Environments:
    """A class's host. spec: its name. time_limit: seconds of a method's call. Raises `TaskError`
    where unusable.
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
        self._asking = threading.Lock()
        self._turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

    @property
    def judges(self) -> bool:
        """Whether the class gives rewards itself."""
        return REWARD in self.description.methods

    def open(self) -> "Environment":
        """A new instance. Raises `RewardError` where the host ends meanwhile."""
        mine, theirs = Pipe()
        with theirs, self._asking:
            self._host.start()
            try:
                send_handle(self._host.pipe, theirs.fileno(), None)
                return Environment(mine, self._host.pipe.recv(), self)
            except (EOFError, OSError):
                mine.close()
                raise RewardError(
                    f"environment: its host ended ({self._host.ending()}); is memory short?"
                ) from None

    def opening(self, problem: Problem) -> str:
        """What `reset` says at a problem, "" for nothing. Raises `RewardError` where it fails."""

        async def reset() -> str:
            environment = self.open()
            try:
                return await environment.reset(problem)
            finally:
                environment.close()

        return completed(reset()) if RESET in self.description.methods else ""

    @property
    def turns(self) -> asyncio.Semaphore:
        """To be taken while a method runs."""
        return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE))


class Environment:
    """One conversation's instance. pipe: to the process `pid`."""

    def __init__(self, pipe: Connection, pid: int, environments: Environments):
        self._pipe, self._pid, self._of = pipe, pid, environments
        self.lost: str | None = None
        """Why there is no instance any more."""

    async def reset(self, problem: Problem) -> str:
        """Begin a problem; what the class says of it, "" for nothing. Raises `RewardError` where it
        fails.
        """
        if RESET not in self._of.description.methods:
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

    async def call(self, name: str, arguments: Mapping[str, Any], seed: str) -> Any:
        """What a method returns, texts for tools, or a `Failure`. One that is not done in time, or
        ends its process, leaves no instance, and further calls fail as it did.
        """
        async with self._of.turns:
            if self.lost is None:
                try:
                    self._pipe.send(Call(name, dict(arguments), seed))
                    await readable(self._pipe, self._of.time_limit + GRACE)
                    return self._pipe.recv()
                except TimeoutError:
                    self.lost = too_long(self._of.time_limit)
                except (EOFError, OSError):
                    self.lost = "ended its process"
                self.close()
            return Failure(f"{self.lost}; the environment is gone")

    def close(self) -> None:
        """End its process, and what it started; once, since its number may be another's
        afterwards.
        """
        if self._pipe.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._pipe.close()


def completed(work: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns, in a thread of its own where this one runs a loop already, as a
    notebook does.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def readable(pipe: Connection, seconds: float) -> None:
    """Wait until there is something to read. Raises `TimeoutError` where it takes longer."""
    loop, fd = asyncio.get_running_loop(), pipe.fileno()
    answered = asyncio.Event()
    loop.add_reader(fd, answered.set)
    try:
        # while turns are sampled the loop stands still, which uses up one part at most
        for _ in range(10):
            with suppress(TimeoutError):
                await asyncio.wait_for(answered.wait(), seconds / 10)
                return
        raise TimeoutError
    finally:
        loop.remove_reader(fd)


@functools.cache
def open_environments(spec: str, time_limit: float) -> Environments:
    """A process has one host of a class. Raises `TaskError` where the class cannot be used."""
    return Environments(spec, time_limit)
