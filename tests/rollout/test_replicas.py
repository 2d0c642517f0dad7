"""Servers that fail: retries, servers that are left out and taken back, and final errors.

Sockets and HTTP are real; the far end is a stand-in that answers as vLLM does. Blind spot: what a
real server does meanwhile, which `scripts/server_faults.py` tries.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from qarl.rollout.engine import EngineError, LostServerError
from qarl.rollout.servers import replicas
from qarl.rollout.servers.replicas import TRIES, Replicas
from qarl.rollout.servers.vllm import client
from qarl.rollout.servers.vllm.answers import read_completion
from qarl.rollout.servers.vllm.client import GENERATE
from qarl.rollout.servers.vllm.replica import VllmReplica
from qarl.rollout.types import Completion
from tests.support.servers import ANSWER, altered

Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Response to a request in place of the answer. If it returns None, the answer is sent."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten all waits to about a hundredth."""
    monkeypatch.setattr(replicas, "_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(client, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(client, "_LONGEST_ANSWER", 2**20)


async def sound(_request: web.Request) -> None:
    return


async def broken_off(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def hanging(_request: web.Request) -> None:
    await asyncio.sleep(30)


async def failing(_request: web.Request) -> web.Response:
    return web.Response(status=500, text="out of memory")


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    with suppress(ConnectionError):
        while True:
            await answer.write(b" " * 2**16)
    return answer


async def elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/")


async def garbled(_request: web.Request) -> web.Response:
    return web.Response(text='{"choices": [{"tok', content_type="application/json")


def answering(**fields: Any) -> Fault:
    async def other(request: web.Request) -> web.Response | None:
        return web.json_response(altered(**fields)) if request.path == GENERATE else None

    return other


class Network:
    """Servers, each with a list of faults that its next requests meet in turn."""

    def __init__(self, *faults: list[Fault]):
        self.faults = [list(some) for some in faults]
        """Faults of each server; the last of a list is met by all later requests."""
        self.requests = [0] * len(faults)
        """Requests for tokens that each server got."""
        self.paused = False
        """Whether the servers say that they are paused."""
        self.beats: Iterator[Fault] = itertools.repeat(sound)
        """Faults of the next heartbeats, unless the server hangs."""
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> Replicas:
        self._session = aiohttp.ClientSession()
        servers = []
        for number in range(len(self.faults)):
            app = web.Application()
            app.router.add_route(
                "*",
                "/{path:.*}",
                lambda request, number=number: self._answered(request, number),
            )
            runner = web.AppRunner(app, shutdown_timeout=0.01)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._runners.append(runner)
            servers.append(
                VllmReplica(
                    f"http://127.0.0.1:{runner.addresses[0][1]}",
                    self._session,
                    seconds=5.0,
                )
            )
        return Replicas(servers, in_flight=4)

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        for runner in self._runners:
            await runner.cleanup()

    async def _answered(self, request: web.Request, number: int) -> web.StreamResponse:
        faults = self.faults[number]
        if request.path == GENERATE:
            self.requests[number] += 1
            fault = faults.pop(0) if len(faults) > 1 else faults[0]
        else:
            fault = hanging if faults[0] is hanging else next(self.beats)
        answer = await fault(request)
        return answer or web.json_response(
            ANSWER if request.path == GENERATE else {"is_paused": self.paused}
        )


COMPLETION = read_completion(ANSWER, "", {"3-d": 3})


async def ask(server: VllmReplica) -> Any:
    return await server.generate({})


async def read(answer: Any, server: VllmReplica) -> Completion:
    return server.read(answer, {"3-d": 3})


def sampled(network: Network, requests: int = 6, pause_seconds: float = 0.0) -> list[Completion]:
    async def go() -> list[Completion]:
        async with network as servers:
            servers.allow_pauses(pause_seconds)
            return await servers.dispatch([(number, ask) for number in range(requests)], read)

    return asyncio.run(go())


@pytest.mark.parametrize(
    "fault",
    [
        broken_off,
        failing,
        garbled,
        endless,
        answering(logprobs={"content": [{"logprob": -9999.0}] * 2}),
        answering(logprobs={"content": [{"logprob": -0.5}]}),
        answering(token_ids=["5", "6"]),
    ],
    ids=["broken off", "failing", "garbled", "endless", "NaN", "short", "no tokens"],
)
def test_an_answer_that_cannot_be_used_is_asked_for_again(
    fault: Fault, caplog: pytest.LogCaptureFixture
):
    """Check that all completions arrive, and that one warning names the fault.

    After `TRIES` tries an error names it.
    """
    network = Network([fault, sound])
    with caplog.at_level(logging.WARNING):
        assert sampled(network) == [COMPLETION] * 6
    assert network.requests == [7]
    assert len(caplog.records) == 1
    with pytest.raises(EngineError, match=f"the last of {TRIES} tries"):
        sampled(Network([fault]), requests=1)


def test_prompts_go_to_no_other_address():
    with pytest.raises(
        EngineError,
        match=r"refused /inference/v1/generate \(HTTP 307\): 307: Temporary Redirect$",
    ):
        sampled(Network([elsewhere]))


def test_the_others_do_what_a_lost_server_would_have(caplog: pytest.LogCaptureFixture):
    """Check that no answered request is repeated, and that no queued one goes to the lost server.

    One warning names the lost server. It is an error if no server is left.
    """
    network = Network([sound, hanging], [sound])
    with caplog.at_level(logging.WARNING):
        assert sampled(network, requests=12) == [COMPLETION] * 12
    assert network.requests == [
        5,
        11,
    ], "of six, one came in, four came to nothing and one was waiting"
    (line,) = caplog.messages
    assert "did not answer /is_paused within 0.2 s" in line
    assert "going on with 1 of 2 servers" in line
    with pytest.raises(EngineError, match=r"no server is left.*resume the run"):
        sampled(Network([hanging]))


def test_a_server_with_other_weights_samples_nothing_more():
    """Check that tokens by unknown weights are not used, and that their server is left out.

    Such a server was restarted, or another run publishes to it.
    """
    old = answering(weight_versions=[{"version": "default", "start": 0, "end": 2}])
    assert sampled(Network([old], [sound])) == [COMPLETION] * 6
    with pytest.raises(EngineError, match=r"by 'default', and not all by '3-d'.*it was restarted"):
        sampled(Network([old]))


def sampling_for(seconds: float) -> Network:
    """Return a network of one server that takes so long for a request."""

    async def under_way(request: web.Request) -> None:
        await asyncio.sleep(seconds if request.path == GENERATE else 0)

    return Network([under_way])


def test_a_paused_server_is_waited_for_as_long_as_a_publish_may_take():
    """Check that a pause while sampling loses a server only if it exceeds the allowed one.

    A publish that waits for no request pauses servers while they sample.
    """
    for seconds, pause_seconds in ((30, 0.0), (30, 0.2), (0.3, 2.0)):
        network = sampling_for(seconds)
        network.paused = True
        if seconds < pause_seconds:
            assert len(sampled(network, pause_seconds=pause_seconds)) == 6
        else:
            with pytest.raises(EngineError, match="was paused while it sampled"):
                sampled(network, pause_seconds=pause_seconds)


def test_a_server_may_miss_some_signs_of_life():
    """Check that two missed heartbeats in a row are tolerated, and three are not."""
    network = sampling_for(0.6)
    network.beats = itertools.cycle([failing, failing, sound])
    assert len(sampled(network)) == 6
    network = sampling_for(30)
    network.beats = itertools.repeat(broken_off)
    with pytest.raises(EngineError, match=r"no server is left.*is_paused"):
        sampled(network)


def test_signs_of_life_are_asked_for_while_a_server_samples():
    """Check that heartbeats end with the last request, however often a server sampled."""
    beats = itertools.count()
    network = sampling_for(0.15)
    network.beats = (sound for _ in beats)

    async def go() -> tuple[int, int]:
        async with network as servers:
            for server in servers.present() * 2:
                await server.generate({})
            counts = []
            for _ in range(2):
                await asyncio.sleep(0.2)
                counts.append(next(beats))
            return counts[0], counts[1]

    sampling, later = asyncio.run(go())
    assert later == sampling + 1 > 3  # what is counted here


def test_one_that_is_taken_back_samples_nothing_before_the_publish_is_done():
    """Check that requests that other servers fail do not go to it, because its weights are old."""

    async def go(network: Network) -> list[int]:
        async with network as servers:
            first, second = servers.present()

            async def lost(server: VllmReplica) -> None:
                if server is second:
                    raise LostServerError(f"no {server.url}")

            await servers.on_all(lost)
            await servers.readmit()
            assert servers.present() == [first, second]
            await servers.dispatch([(number, ask) for number in range(4)], read)
            before = list(network.requests)
            servers.all_are_current()
            await servers.dispatch([(number, ask) for number in range(4)], read)
            return before + network.requests

    assert asyncio.run(go(Network([sound], [sound]))) == [4, 0, 6, 2]
