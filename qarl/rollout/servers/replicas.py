"""Replicas that may fail one by one: which is asked, how often, and which are left out.

An answer that broke off or is unusable is requested again from the next server, which samples the
same: sample k of prompt j does not depend on the server. A lost server is left out, and its
requests go to the others. The next publish readmits it if it answers again; until then it lacks the
weights published last. A request that fails `TRIES` times is an error, and so is a run without
servers.
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
    """All servers of a run.

    Args:
        servers: The servers, in the order in which prompts are dealt to them.
        in_flight: Upper bound on pending requests of one server.
    """

    def __init__(self, servers: Sequence[VllmReplica], in_flight: int):
        self._servers = list(servers)
        self._slots = {server: asyncio.Semaphore(in_flight) for server in servers}
        self._lost: dict[VllmReplica, str] = {}
        self._outdated: set[VllmReplica] = set()
        self._warnings: set[str] = set()

    def allow_pauses(self, seconds: float) -> None:
        """Set how many seconds a server may be paused while it samples before it counts as lost."""
        for server in self._servers:
            server.allow_pause(seconds)

    def present(self) -> list[VllmReplica]:
        """Return the servers that are not left out, in their given order."""
        return [server for server in self._servers if server not in self._lost]

    async def on_all(
        self,
        step: Callable[[VllmReplica], Awaitable[T]],
    ) -> dict[VllmReplica, T]:
        """Run a step on all present servers at once and return each server's result.

        A server that is lost is left out of the result. Raises `EngineError` that names every
        server on which the step failed.
        """
        servers = self._require_present()
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
        self._require_present()
        return {
            server: outcome
            for server, outcome in zip(servers, outcomes, strict=True)
            if not isinstance(outcome, BaseException)
        }

    async def with_retries(
        self, server: VllmReplica, step: Callable[[VllmReplica], Awaitable[T]]
    ) -> T:
        """Run a step on one server, and retry it after answers that are unusable.

        Raises `LostServerError` if the last try's answer broke off.
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
        """Send requests for tokens to the servers and return the results of `read`, in order.

        Args:
            requests: Each request with the index of the server to ask first, modulo the number of
                servers.
            read: Turns an answer into a result, and raises `AnswerError` if it is unusable.
        """
        self._warnings.clear()

        async def answer_one(number: int, request: Callable[[VllmReplica], Awaitable[Any]]) -> T:
            failures = 0
            while True:
                server = self._next_server(number + failures)
                try:
                    async with self._slots[server]:
                        # It may have been lost while this request waited for a slot.
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
                    self._warn_once(f"{error}; asking again")
                    await asyncio.sleep(_PAUSE_SECONDS * failures)

        return await await_all(answer_one(number, request) for number, request in requests)

    async def readmit(self, *steps: Callable[[VllmReplica], Awaitable[None]]) -> None:
        """Readmit the lost servers that pass every step.

        They sample only after the next publish (`all_are_current`).
        """

        async def readmit_one(server: VllmReplica) -> None:
            try:
                for step in steps:
                    await step(server)
            except EngineError as error:
                self._lost[server] = str(error)
                return
            del self._lost[server]
            self._outdated.add(server)
            _log.warning(
                "the server at %s answers again, and takes part in this publish",
                server.url,
            )

        await await_all(readmit_one(server) for server in list(self._lost))

    def all_are_current(self) -> None:
        """Record that all present servers have the version published last."""
        self._outdated.clear()

    def _require_present(self) -> list[VllmReplica]:
        """Return the present servers, or raise `EngineError` if there is none."""
        servers = self.present()
        if not servers:
            raise EngineError(
                f"no server is left: {'; '.join(self._lost.values())}; start one and resume the run"
            )
        return servers

    def _next_server(self, number: int) -> VllmReplica:
        """Return server `number` modulo the number of servers, or the next one that can sample.

        Readmitted servers that do not have the latest version yet are skipped, unless no other is
        present.
        """
        present = set(self._require_present())
        candidates = present - self._outdated or present
        first = number % len(self._servers)
        rotated = self._servers[first:] + self._servers[:first]
        return next(server for server in rotated if server in candidates)

    def _leave_out(self, server: VllmReplica, reason: LostServerError) -> None:
        """Mark a server as lost."""
        if server not in self._lost:
            self._lost[server] = str(reason)
            remaining = len(self._servers) - len(self._lost)
            total = len(self._servers)
            _log.warning("%s; going on with %d of %d servers", reason, remaining, total)

    def _warn_once(self, line: str) -> None:
        """Log `line` once per `dispatch`: a bad server may give thousands of bad answers."""
        if line not in self._warnings:
            self._warnings.add(line)
            _log.warning("%s", line)


async def await_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    If one raises, the others are cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    # Not `except*`: before Python 3.11.4 it wraps what is raised again into another group.
    except ExceptionGroup as errors:
        engine_errors, other_errors = errors.split(EngineError)
        if engine_errors is None or other_errors:
            raise errors from None
        raise engine_errors.exceptions[0] from None
    return [task.result() for task in tasks]
