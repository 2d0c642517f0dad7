"""Independent servers as one engine: each holds the whole policy, prompts are dealt to them, and a
weight version reaches all or none.

Sample k of prompt j depends on (seed, j, k) and the weights alone, so the number and the order of
servers decide when it is sampled and not what.
"""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from qarl.quant.digest import digested
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.engine import EngineError, LoadReport
from qarl.rollout.servers.publish import publish_files
from qarl.rollout.servers.replicas import Replicas, all_of
from qarl.rollout.servers.sender import VersionSender
from qarl.rollout.servers.versions import Version, seconds_of
from qarl.rollout.servers.vllm.replica import VllmReplica
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.rollout.vllm.options import VllmOptions
from qarl.rollout.vllm.requests import load_tokenizer, text_of

T = TypeVar("T")
_BACK_SECONDS = 3.0
_IDLE_SECONDS = 2.0
"""Connections idle for longer are not used again: vLLM's servers close theirs after 5 s, and what
is asked then breaks off.
"""

_log = logging.getLogger(__name__)


class ServerEngine:
    """Servers that run already.

    urls: where. key: that they ask for, or None. folder: the run's own, where weight versions are
    written, on a file system that they see under the same path, unless `server_transfer` is http:
    then they are sent the files. checkpoint: whose tokenizer makes texts of tokens. options: of the
    run; with `max_staleness` from 2 on requests under way at a publish go on by its weights, else
    they end first. learner: the run's name, which no other run's servers have. publishes: whether
    this process is the one of its run that publishes; the others count on it. at_end: done after
    `close`. Raises `EngineError` for a server that does not answer, refuses the key, lacks an
    endpoint, has other settings than `options`, or belongs to another run.
    """

    def __init__(
        self,
        urls: Sequence[str],
        key: str | None,
        folder: Path,
        checkpoint: Path,
        options: VllmOptions,
        learner: str,
        publishes: bool = True,
        at_end: Callable[[], None] = lambda: None,
    ):
        rollout = options.rollout
        self.weight_version = 0
        self._labels: dict[str, int] = {}
        self._claims: set[VllmReplica] = set()
        self._settled = asyncio.Event()
        self._in_flight = rollout.max_staleness > 1
        self._sender = VersionSender(folder, rollout.server_full_every)
        self._publishes = publishes
        self._at_end = at_end
        self._options, self._learner = options, learner
        self._sends_as = learner if rollout.server_transfer == "http" else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._wait(_open_session(key))
        servers = [
            VllmReplica(url.rstrip("/"), self._session, rollout.server_seconds) for url in urls
        ]
        self._replicas = Replicas(servers, rollout.max_num_seqs)
        try:
            # none is claimed before all are known to fit
            for step in (self._admitted, self._claimed):
                self._wait(all_of(self._replicas.with_retries(server, step) for server in servers))
            self._tokenizer = load_tokenizer(checkpoint)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """See `Engine.generate`. Prompt j goes to server j modulo their number; where that one
        fails, to the next.
        """
        if not self._in_flight:
            self._refuse_unsettled()
        completions = self._wait(self._sampled(prompts, sampling))
        step = sampling.samples
        if not sampling.stop:
            for i, one in enumerate(completions):
                text = text_of(
                    self._tokenizer,
                    prompts[i // step].token_ids,
                    one.token_ids,
                    one.finish_reason,
                )
                completions[i] = dataclasses.replace(one, text=text)
        return [completions[i : i + step] for i in range(0, len(completions), step)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.logprobs`."""
        return self.logprobs_of_each(sequences)[0]

    def logprobs_of_each(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """See `Engine.logprobs_of_each`."""
        self._refuse_unsettled()
        scored = self._wait(self._replicas.on_all(lambda server: self._scored(server, sequences)))
        return list(scored.values())

    def layers(self) -> list[LayerReport]:
        """See `Engine.layers`. Raises `EngineError` where the servers' layers differ."""
        reports = self._wait(self._replicas.on_all(lambda server: server.layers()))
        first, expected = next(iter(reports.items()))
        for server, layers in reports.items():
            if layers != expected:
                raise EngineError(
                    f"the servers at {first.url} and {server.url} have different layers; start both"
                    " alike"
                )
        return expected

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """See `Engine.load`. The stream is written once and read by every server; requests under
        way end first, or go on by it. A process that does not publish returns what it would have
        sent. Raises `DeltaError` for a stream of other tensors than the one before.
        """
        self._wait(self._set_publish_complete(False))
        if self._publishes:
            report, digest = self._published(stream, version)
        else:
            self._wait(self._replicas.readmit(self._answering))
            report, digest = self._counted(stream)
        if report.took_all_of(digest):
            self.weight_version = version
            self._labels = (self._labels if self._in_flight else {}) | {
                _label(version, digest): version
            }
            self._wait(self._set_publish_complete(True))
        return report

    def shared_layers(self) -> None:
        """See `Engine.shared_layers`: they are in other processes."""

    def close(self) -> None:
        """Let go of the servers; they go on with the weights they have. Requests under way are
        given up.
        """
        if self._loop.is_running():
            self._wait(self._leave())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if self._publishes:
            self._sender.remove()
        self._at_end()

    def _published(self, stream: Iterable[LowBitTensor], version: int) -> tuple[LoadReport, str]:
        """What the servers loaded, and the digest of what was written."""
        try:
            written = self._sender.write(stream, version, self._wait(self._held()))
            self._expect_pause(written.tensor_bytes)
            report = self._wait(self._to_all(written))
        except EngineError as error:
            raise EngineError(
                f"weight version {version} did not reach all servers: {error}"
            ) from error
        self._sender.sent(version)
        return report, written.digest

    def _counted(self, stream: Iterable[LowBitTensor]) -> tuple[LoadReport, str]:
        """What the process that publishes is told by the servers where all is well."""
        digest = digested(stream)
        self._expect_pause(digest.bytes)
        return LoadReport(digest.hexdigest(), digest.tensors, (), ()), digest.hexdigest()

    def _expect_pause(self, tensor_bytes: int) -> None:
        """Of the publish of so many bytes that is under way, or of another process's."""
        if self._in_flight:
            self._loop.call_soon_threadsafe(self._replicas.allow_pauses, seconds_of(tensor_bytes))

    async def _held(self) -> list[str | None]:
        """The digest of the version that each worker of each server holds, those taken back too;
        None for nothing.
        """
        await self._replicas.readmit(self._answering, self._claimed)
        held_by_each = await self._replicas.on_all(lambda server: server.held())
        return [digest for digests in held_by_each.values() for digest in digests]

    async def _to_all(self, written: Version) -> LoadReport:
        """What the servers loaded; a delta that some refuse is followed by the whole version."""
        how = (
            _label(written.version, written.digest),
            self._sender.keeps,
            self._in_flight,
            self._sends_as,
        )
        try:
            return await publish_files(self._replicas, written, *how)
        except EngineError as error:
            if written.base is None:
                raise
            _log.warning(
                "the delta to weight version %d failed, so it is sent whole: %s",
                written.version,
                error,
            )
            return await publish_files(self._replicas, self._sender.write_whole(), *how)

    async def _answering(self, server: VllmReplica) -> None:
        """`_admitted` at once, or not at this publish: a server that hangs is asked at each."""
        await server.admit(self._options, self._learner, _BACK_SECONDS)

    async def _admitted(self, server: VllmReplica) -> None:
        await server.admit(self._options, self._learner)

    async def _claimed(self, server: VllmReplica) -> None:
        if self._publishes:
            await server.claim(self._learner)
            self._claims.add(server)

    async def _leave(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        leaving = (
            server.release() for server in self._replicas.present() if server in self._claims
        )
        await asyncio.gather(*leaving, return_exceptions=True)
        await self._session.close()

    async def _sampled(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        """Of every prompt in turn. A request that is answered while a version is published is read
        when it is.
        """
        await self._settled.wait()
        begun, salt = self.weight_version, self._salt
        # which may be on its way yet, from another process
        oldest = begun if self._publishes else begun - 1

        def request(prompt: Prompt, j: int, k: int) -> Callable[[VllmReplica], Awaitable[Any]]:
            return lambda server: server.sample(prompt, sampling, j, k, salt)

        async def read(answer: Any, server: VllmReplica) -> Completion:
            await self._settled.wait()
            labels = {
                label: version for label, version in self._labels.items() if version >= oldest
            }
            return server.read(answer, labels)

        pairs = (
            (j, prompt, k) for j, prompt in enumerate(prompts) for k in range(sampling.samples)
        )
        requests = [
            (
                prompt.draws[0] if prompt.draws else sampling.first_prompt + j,
                request(prompt, j, k),
            )
            for j, prompt, k in pairs
        ]
        return await self._replicas.dispatch(requests, read)

    async def _scored(
        self, server: VllmReplica, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        salt, labels = self._salt, {self._salt: self.weight_version}
        return await all_of(server.logprobs(sequence, salt, labels) for sequence in sequences)

    async def _set_publish_complete(self, complete: bool) -> None:
        """Whether what is sampled now is of the version published last; in the requests' own
        thread.
        """
        if complete:
            self._replicas.all_are_current()
            self._settled.set()
        else:
            self._settled.clear()

    @property
    def _salt(self) -> str:
        """Of prefix caches: the label of the version published last."""
        return next(reversed(self._labels))

    def _refuse_unsettled(self) -> None:
        if not self._settled.is_set():
            raise EngineError(
                "the last publish did not reach all servers, or there was none; publish again"
            )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, run in the background's loop. Raises `EngineError` where it is
        closed meanwhile.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError as error:
            raise EngineError("the servers were let go of while they sampled") from error


async def _open_session(key: str | None) -> aiohttp.ClientSession:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    return aiohttp.ClientSession(headers=headers, connector=connector)


def _label(version: int, digest: str) -> str:
    """What servers say sampled a token; by its digest no two runs' versions are confused."""
    return f"{version}-{digest}"
