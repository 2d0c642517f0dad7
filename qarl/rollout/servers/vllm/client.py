"""HTTP to one server: JSON or a file is sent, JSON comes back.

Every request has a time limit, and every error names the server.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from qarl.rollout.engine import (
    AnswerError,
    BrokenAnswerError,
    EngineError,
    LostServerError,
)
from qarl.rollout.servers.vllm.receive import VERSIONS

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0
"""Timeout in seconds for requests that neither sample nor read weights."""
BEAT_SECONDS = 5.0
"""Seconds between two heartbeat requests while a server samples."""
PATIENCE_SECONDS = 45.0
"""Timeout in seconds for one heartbeat.

A server that hangs is noticed within a minute, however long a completion may take.
"""
_BEATS_MISSED = 3
"""Number of heartbeats in a row whose connection has to break before the server counts as lost."""
_LONGEST_ANSWER = 2**28
"""Upper bound on an answer, in bytes, so that an endless one cannot fill memory.

It is far beyond a completion with its log-probs and experts.
"""
REMEDY = "start servers with `qarl serve-rollouts` and the run's own configuration"
GENERATE = "/inference/v1/generate"
_DEVELOPMENT = (
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/update_weight_version",
)
"""Paths that a server offers only with VLLM_SERVER_DEV_MODE=1."""


class Server:
    """HTTP client of one replica.

    Args:
        url: Base URL.
        session: Session whose headers carry the key.
        seconds: Upper bound on the time for any answer, in seconds.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, seconds: float):
        self.url = url
        self._session = session
        self.seconds = seconds
        self._pause_seconds = 0.0
        self._pending = 0
        self._heartbeat: asyncio.Task[None] | None = None

    def allow_pause(self, seconds: float) -> None:
        """Set how many seconds the server may be paused while it samples before it counts as lost.

        Publishes that do not wait for pending requests pause it.
        """
        self._pause_seconds = seconds

    async def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = CONTROL_SECONDS,
    ) -> Any:
        """Post `body` as JSON and return the answer.

        Raises:
            LostServerError: The server does not answer within `seconds`.
            AnswerError: The answer broke off, or the server failed.
            EngineError: The server refuses the request.
        """
        return await self._request("POST", path, seconds, json=body or {})

    async def upload(self, path: str, file: Path, seconds: float) -> Any:
        """Post a file and return the answer. Raises the same errors as `post`."""
        with file.open("rb") as content:
            return await self._request("POST", path, seconds, data=content)

    async def call(
        self, method: str, seconds: float = CONTROL_SECONDS, **arguments: Any
    ) -> list[Any]:
        """Call a method of `rollout.servers.vllm.worker.ServerExtension`.

        Returns one result per worker of the server.
        """
        answer = await self.post(
            "/collective_rpc", {"method": method, "kwargs": arguments}, seconds
        )
        return answer["results"]

    async def generate(self, body: dict[str, Any]) -> Any:
        """Send a request for tokens or log-probs, and watch the server until it answers.

        Raises the same errors as `post`, and `LostServerError` if the server shows no sign of life
        or stays paused.
        """
        request = asyncio.ensure_future(self.post(GENERATE, body, self.seconds))
        # All pending requests of the server share one heartbeat.
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = asyncio.ensure_future(self._watch())
            # Retrieve the error in any case, so that asyncio does not log it as never retrieved.
            self._heartbeat.add_done_callback(lambda task: task.cancelled() or task.exception())
        heartbeat = self._heartbeat
        self._pending += 1
        try:
            await asyncio.wait({request, heartbeat}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
            raise LostServerError(str(heartbeat.exception()))
        finally:
            self._pending -= 1
            request.cancel()
            if not self._pending and self._heartbeat:
                self._heartbeat.cancel()
                self._heartbeat = None

    async def _watch(self) -> None:
        """Send heartbeats until cancelled.

        Raises `LostServerError` if the server hangs or stays paused.
        """
        missed = 0
        paused_at = None
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(BEAT_SECONDS, self.seconds))
            try:
                answer = await self._request("GET", "/is_paused", PATIENCE_SECONDS)
            except AnswerError as error:
                missed += 1
                if missed == _BEATS_MISSED:
                    raise LostServerError(str(error)) from error
                continue
            missed = 0
            paused_at = (paused_at or clock()) if answer["is_paused"] else None
            if paused_at is not None and clock() - paused_at >= self._pause_seconds:
                raise LostServerError(
                    f"the server at {self.url} was paused while it sampled; nothing else may do"
                    " that"
                )

    async def _request(
        self,
        kind: str,
        path: str,
        seconds: float,
        **content: Any,
    ) -> Any:
        seconds = min(seconds, self.seconds)
        base = path.partition("?")[0]
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        content["allow_redirects"] = False  # prompts are for this server alone
        try:
            async with self._session.request(
                kind, f"{self.url}{path}", timeout=limit, **content
            ) as answer:
                body = await _bounded(answer)
                if answer.status == 200:
                    return json.loads(body)
                raise self._refused(base, answer.status, body.decode(errors="replace"))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise LostServerError(f"no server answers at {self.url}: {error}; {REMEDY}") from error
        except TimeoutError as error:
            remedy = ", or raise rollout.server_seconds" if seconds == self.seconds else ""
            raise LostServerError(
                f"the server at {self.url} did not answer {base} within {seconds:g} s; look at its"
                f" log{remedy}"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
            raise BrokenAnswerError(
                f"the server at {self.url} broke off its answer to {base}: {problem}"
            ) from error

    def _refused(self, base: str, status: int, text: str) -> EngineError:
        """Return the error for an answer whose HTTP status is not 200."""
        if status == 401:
            return EngineError(
                f"the server at {self.url} refused the API key; give the one it was started with,"
                " in a file (rollout.server_key_file) or in the environment (QARL_SERVER_KEY)"
            )
        if status == 404:
            if base.startswith(VERSIONS):
                needs = "QaRL's middleware"
            elif base in _DEVELOPMENT:
                needs = "VLLM_SERVER_DEV_MODE=1"
            else:
                needs = "--enable-scale-out"
            return EngineError(
                f"the server at {self.url} has no {base}: it was started without {needs}; {REMEDY}"
            )
        # A server that failed may succeed at the next try; one that refuses will refuse again.
        kind, verb = (AnswerError, "failed at") if status >= 500 else (EngineError, "refused")
        reason = " ".join(text.split())[:500]
        return kind(f"the server at {self.url} {verb} {base} (HTTP {status}): {reason}")


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body. Raises `ValueError` if it is longer than `_LONGEST_ANSWER`."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > _LONGEST_ANSWER:
            raise ValueError(f"it is longer than {_LONGEST_ANSWER >> 20} MiB")
    return bytes(body)
