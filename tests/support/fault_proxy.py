"""Proxy between a learner and one server that breaks one request, as networks and failing servers
do.

Requests and answers pass unchanged except for the armed one, the n-th of a phase. The proxy's
changes to answers are such as a server could send; it does not change what the server itself does.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from qarl.rollout.servers.vllm.client import GENERATE
from qarl.rollout.servers.vllm.receive import VERSIONS

PHASES = ("join", "audit", "stage", "commit", "canary", "sample")
"""Phases of requests. "send" exists if versions are sent (`rollout.server_transfer http`)."""
SENDING = "half a request"
"""Faults of a request that has a body."""
NETWORK = (
    "cut before",
    "cut after",
    "half an answer",
    "HTTP 500",
    "no JSON",
    "slow",
    "hang",
)
"""Faults of any request. "cut after": the connection breaks after the server has done its work."""
ANSWERS = (
    "NaN",
    "one log-prob too few",
    "one log-prob too many",
    "other weights",
    "no tokens",
)
"""Faults of an answer of tokens."""
SLOW_SECONDS = 2.0
_PHASE_OF = {
    "qarl_claim": "join",
    "qarl_layer_reports": "audit",
    "qarl_abandon": "stage",
    "/pause": "commit",
    "/resume": "commit",
    "qarl_release": "leave",
}


@dataclass(frozen=True)
class Fault:
    """One fault of a kind in `NETWORK`, `ANSWERS`, `SENDING` or `act`.

    number counts the phase's requests, from 1. act is called before the request.
    """

    kind: str
    phase: str
    number: int = 1
    act: Callable[[], None] | None = None


class Proxy:
    """Proxy in front of the server at `target`, in its own thread, until `close`.

    It listens at `url`.
    """

    def __init__(self, target: str):
        self._target = target
        self._loop = asyncio.new_event_loop()
        self.reset(None)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url: str = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    def reset(self, fault: Fault | None) -> None:
        """Restore the initial state and arm `fault`.

        `struck` is the time of the fault by time.time; `counts` are the requests of each phase.
        """
        self.struck: float | None = None
        self.counts: Counter[str] = Counter()
        self._fault = fault
        self._phase = "join"
        self._hangs = False

    def close(self) -> None:
        """Stop the proxy and drop its connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _listen(self) -> str:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handled)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handled(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._due(request.path, body)
        if self._hangs:
            await asyncio.sleep(3600)
        if fault is None:
            return await self._passed_on(request, body)
        self.struck = time.time()
        if fault.act:
            fault.act()
        if fault.kind == "cut before":
            return _cut(request)
        if fault.kind == "hang":
            self._hangs = True
            await asyncio.sleep(3600)
        if fault.kind == "HTTP 500":
            return web.Response(status=500, text="CUDA out of memory (planted)")
        if fault.kind == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if fault.kind == SENDING:
            await self._passed_on(request, _broken_off(body), len(body))
            return _cut(request)
        answer = await self._passed_on(request, body)
        if fault.kind == "cut after":
            return _cut(request)
        if fault.kind == "no JSON":
            return web.Response(text="<html>504</html>", content_type="text/html")
        if fault.kind == "half an answer":
            return await _half(request, answer)
        return _altered(answer, fault.kind) if fault.kind in ANSWERS else answer

    def _due(self, path: str, body: bytes) -> Fault | None:
        """Count the request. Return the fault if this is the armed request."""
        with contextlib.suppress(ValueError):
            fields = json.loads(body) if body and not path.startswith(VERSIONS) else {}
            if path.startswith(VERSIONS):
                self._phase = "send"
            elif path == GENERATE:
                parameters = fields.get("sampling_params", {})
                self._phase = (
                    "canary" if parameters.get("prompt_logprobs") is not None else "sample"
                )
            else:
                self._phase = _PHASE_OF.get(fields.get("method", path), self._phase)
        if path in ("/is_paused", "/health"):
            return None
        self.counts[self._phase] += 1
        fault = self._fault
        if fault is None or self.struck is not None or fault.phase != self._phase:
            return None
        if fault.kind in ANSWERS and path != GENERATE:
            return None
        return fault if self.counts[self._phase] >= fault.number else None

    async def _passed_on(
        self, request: web.Request, body: Any, length: int | None = None
    ) -> web.Response:
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Content-Type")
            if name in request.headers
        }
        headers |= {} if length is None else {"Content-Length": str(length)}
        try:
            async with self._session.request(
                request.method,
                f"{self._target}{request.path_qs}",
                data=body,
                headers=headers,
            ) as answer:
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, OSError):
            return _cut(request)


async def _broken_off(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    await asyncio.sleep(0.1)
    raise ConnectionResetError


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _half(request: web.Request, answer: web.Response) -> web.StreamResponse:
    whole = answer.body
    assert isinstance(whole, bytes)
    begun = web.StreamResponse(
        headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"}
    )
    await begun.prepare(request)
    await begun.write(whole[: len(whole) // 2])
    await asyncio.sleep(0.05)
    _cut(request)
    return begun


def _altered(answer: web.Response, kind: str) -> web.Response:
    """Return an answer of tokens with one fault."""
    assert isinstance(answer.body, bytes)
    fields: dict[str, Any] = json.loads(answer.body)
    (choice,) = fields["choices"]
    content = choice["logprobs"]["content"]
    if kind == "NaN":
        content[-1]["logprob"] = -9999.0
    elif kind == "one log-prob too few":
        content.pop()
    elif kind == "one log-prob too many":
        content.append(dict(content[-1]))
    elif kind == "other weights":
        choice["weight_versions"] = [{"version": "default", "start": 0, "end": len(content)}]
    else:
        choice["token_ids"] = None
    return web.json_response(fields)
