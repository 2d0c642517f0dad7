"""Servers that may fail, each by itself: who is asked, how often, and who is left out until the
next publish.

An answer that broke off or cannot be used is asked for again, of the next server: sample k of
prompt j is the same there. A server that is lost is left out, its requests go to the others, and
the next publish takes it back where it answers again: until then its weights are not the ones
published last. What fails `TRIES` times is an error, and so is having no server left.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from qarl.rollout.engine import (
    AnswerError,
    BrokenAnswerError,
    EngineError,
    LostServerError,
)
from qarl.rollout.servers.vllm.replica import VllmReplica

T = TypeVar("T")

TRIES = 3
_PAUSE_SECONDS = 0.5
_log = logging.getLogger(__name__)


class Replicas:
    """servers: all of a run's. in_flight: requests that one may have under way, of all who ask."""

    def __init__(self, servers: Sequence[VllmReplica], in_flight: int):
        self._servers = list(servers)
        self._free = {server: asyncio.Semaphore(in_flight) for server in servers}
        self._lost: dict[VllmReplica, str] = {}
        self._behind: set[VllmReplica] = set()
        self._noticed: set[str] = set()

    def allow_pauses(self, seconds: float) -> None:
        """Take none for lost that is paused no longer than that while it is asked for tokens."""
        for server in self._servers:
            server.allow_pause(seconds)

    def present(self) -> list[VllmReplica]:
        """Those that are not left out, in the order they were given."""
        return [server for server in self._servers if server not in self._lost]

    async def on_all(self, step: Callable[[VllmReplica], Awaitable[T]]) -> dict[VllmReplica, T]:
        """What the step returns of each present server, all at once. Raises `EngineError` naming
        each that failed.
        """
        servers = self._some()
        outcomes = await asyncio.gather(
            *(self.with_retries(server, step) for server in servers),
            return_exceptions=True,
        )
        failed: list[BaseException] = []
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, LostServerError):
                self._leave_out(server, outcome)
            elif isinstance(outcome, BaseException):
                failed.append(outcome)
        if failed:
            raise EngineError("; ".join(str(error) for error in failed)) from failed[0]
        self._some()
        return {
            s: o for s, o in zip(servers, outcomes, strict=True) if not isinstance(o, BaseException)
        }

    async def with_retries(
        self, server: VllmReplica, step: Callable[[VllmReplica], Awaitable[T]]
    ) -> T:
        """What the step returns of one server, tried again where an answer cannot be used. Raises
        `LostServerError` where they broke off each time.
        """
        for attempt in range(1, TRIES):
            try:
                return await step(server)
            except AnswerError as error:
                _log.warning("%s; trying again", error)
                await asyncio.sleep(_PAUSE_SECONDS * attempt)
        try:
            return await step(server)
        except BrokenAnswerError as error:
            raise LostServerError(str(error)) from error

    async def dispatch(
        self,
        requests: Sequence[tuple[int, Callable[[VllmReplica], Awaitable[Any]]]],
        read: Callable[[Any, VllmReplica], Awaitable[T]],
    ) -> list[T]:
        """What `read` makes of the answers to requests for tokens. requests: each with the number
        of the server that is asked first, modulo their number.
        """
        self._noticed.clear()

        async def one(number: int, request: Callable[[VllmReplica], Awaitable[Any]]) -> T:
            failures = 0
            while True:
                server = self._turn(number + failures)
                try:
                    async with self._free[server]:
                        if server in self._lost:
                            continue
                        answer = await request(server)
                    return await read(answer, server)
                except LostServerError as error:
                    self._leave_out(server, error)
                except AnswerError as error:
                    failures += 1
                    if failures == TRIES:
                        raise EngineError(f"{error}; that was the last of {TRIES} tries") from error
                    self._notice(f"{error}; asking again")
                    await asyncio.sleep(_PAUSE_SECONDS * failures)

        return await all_of(one(number, request) for number, request in requests)

    async def readmit(self, *steps: Callable[[VllmReplica], Awaitable[None]]) -> None:
        """Readmit lost servers that pass every step; they sample after the next publish alone
        (`all_are_current`).
        """

        async def back(server: VllmReplica) -> None:
            try:
                for step in steps:
                    await step(server)
            except EngineError as error:
                self._lost[server] = str(error)
                return
            del self._lost[server]
            self._behind.add(server)
            _log.warning(
                "the server at %s answers again, and takes part in this publish",
                server.url,
            )

        await all_of(back(server) for server in list(self._lost))

    def all_are_current(self) -> None:
        """All that are present have the version published last."""
        self._behind.clear()

    def _some(self) -> list[VllmReplica]:
        servers = self.present()
        if not servers:
            raise EngineError(
                f"no server is left: {'; '.join(self._lost.values())}; start one and resume the run"
            )
        return servers

    def _turn(self, number: int) -> VllmReplica:
        """Replica `number` modulo their number, or the next one that is present and, while a
        version is published to those that were left out, was not.
        """
        present = set(self._some())
        present = present - self._behind or present
        turns = (
            self._servers[(number + i) % len(self._servers)] for i in range(len(self._servers))
        )
        return next(server for server in turns if server in present)

    def _leave_out(self, server: VllmReplica, reason: LostServerError) -> None:
        if server not in self._lost:
            self._lost[server] = str(reason)
            left = len(self._servers) - len(self._lost)
            _log.warning("%s; going on with %d of %d servers", reason, left, len(self._servers))

    def _notice(self, line: str) -> None:
        """Say it, once a call: a server that gives one bad answer may give a thousand."""
        if line not in self._noticed:
            self._noticed.add(line)
            _log.warning("%s", line)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of some coroutines return, in order; where one raises, the others are given up."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    # in `except*` Python before 3.11.4 makes a group of what is raised again
    except ExceptionGroup as errors:
        own, others = errors.split(EngineError)
        raise errors if others or own is None else own.exceptions[0] from None
    return [task.result() for task in tasks]
