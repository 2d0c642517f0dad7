"""HTTP to one server: JSON or a file there, JSON back, all within a time limit, every error naming
the server.
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
"""That an answer may take for which nothing is sampled and no weights are read."""
BEAT_SECONDS, PATIENCE_SECONDS = 5.0, 45.0
"""While a server samples it is asked for a sign of life so often, and given so long for it: one
that hangs is noticed within a minute, however long a completion may take.
"""
_BEATS_MISSED = 3
"""Signs of life in a row whose connection may break."""
_LONGEST_ANSWER = 2**28
"""Bytes: far beyond a completion with its log-probs and experts; one that goes on for ever must not
fill memory.
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
"""What a server has with VLLM_SERVER_DEV_MODE=1 alone."""


class Server:
    """One replica. url: where. session: whose headers carry the key. seconds: that an answer may
    take at most.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, seconds: float):
        self.url = url
        self._session = session
        self.seconds = seconds
        self._pause_seconds = 0.0
        self._asked = 0
        self._pulse: asyncio.Task[None] | None = None

    def allow_pause(self, seconds: float) -> None:
        """Not lost where it is paused no longer than that while it samples: by a publish that waits
        for no request.
        """
        self._pause_seconds = seconds

    async def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = CONTROL_SECONDS,
    ) -> Any:
        """What the server answers to `body`. Raises `LostServerError` where it does not within
        `seconds`, `AnswerError` where the answer broke off or the server failed at it,
        `EngineError` where it refuses.
        """
        return await self._request("POST", path, seconds, json=body or {})

    async def upload(self, path: str, file: Path, seconds: float) -> Any:
        """What the server answers to a file. Raises what `post` does."""
        with file.open("rb") as content:
            return await self._request("POST", path, seconds, data=content)

    async def call(
        self, method: str, seconds: float = CONTROL_SECONDS, **arguments: Any
    ) -> list[Any]:
        """What a method of `rollout.servers.vllm.worker.ServerExtension` returns, from each of the
        server's workers.
        """
        answer = await self.post(
            "/collective_rpc", {"method": method, "kwargs": arguments}, seconds
        )
        return answer["results"]

    async def generate(self, body: dict[str, Any]) -> Any:
        """What the server answers to a request for tokens or log-probs. Raises what `post` does,
        and `LostServerError` where it shows no sign of life meanwhile, or is paused.
        """
        asking = asyncio.ensure_future(self.post(GENERATE, body, self.seconds))
        if self._pulse is None or self._pulse.done():
            self._pulse = asyncio.ensure_future(self._watched())
            # read, or not
            self._pulse.add_done_callback(lambda pulse: pulse.cancelled() or pulse.exception())
        pulse, self._asked = self._pulse, self._asked + 1
        try:
            await asyncio.wait({asking, pulse}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise LostServerError(str(pulse.exception()))
        finally:
            self._asked -= 1
            asking.cancel()
            if not self._asked and self._pulse:
                self._pulse.cancel()
                self._pulse = None

    async def _watched(self) -> None:
        missed, paused_at, clock = 0, None, asyncio.get_running_loop().time
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

    async def _request(self, kind: str, path: str, seconds: float, **content: Any) -> Any:
        seconds, base = min(seconds, self.seconds), path.partition("?")[0]
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
        if status == 401:
            return EngineError(
                f"the server at {self.url} refused the API key; give the one it was started with,"
                " in a file (rollout.server_key_file) or in the environment (QARL_SERVER_KEY)"
            )
        if status == 404:
            needs = "VLLM_SERVER_DEV_MODE=1" if base in _DEVELOPMENT else "--enable-scale-out"
            needs = "QaRL's middleware" if base.startswith(VERSIONS) else needs
            return EngineError(
                f"the server at {self.url} has no {base}: it was started without {needs}; {REMEDY}"
            )
        kind, verb = (AnswerError, "failed at") if status >= 500 else (EngineError, "refused")
        return kind(
            f"the server at {self.url} {verb} {base} (HTTP {status}):"
            f" {' '.join(text.split())[:500]}"
        )


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    """The body. Raises `ValueError` for one beyond `_LONGEST_ANSWER`."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > _LONGEST_ANSWER:
            raise ValueError(f"it is longer than {_LONGEST_ANSWER >> 20} MiB")
    return bytes(body)
