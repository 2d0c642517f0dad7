"""Independent servers as one engine.

Each server holds the whole policy. Prompts are dealt to the servers, and a weight version reaches
all of them or none. Sample k of prompt j depends on (seed, j, k) and the weights alone, so the
number and order of servers affect timing only, never results.
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
from qarl.rollout.servers.replicas import Replicas, await_all
from qarl.rollout.servers.sender import VersionSender
from qarl.rollout.servers.versions import Version, publish_timeout
from qarl.rollout.servers.vllm.replica import VllmReplica
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.rollout.vllm.options import VllmOptions
from qarl.rollout.vllm.requests import load_tokenizer, text_of
from qarl.rollout.vocabulary import Vocabulary

T = TypeVar("T")
_BACK_SECONDS = 3.0
"""Timeout in seconds for the answer of a lost server that a publish wants to readmit."""
_IDLE_SECONDS = 2.0
"""Connections that were idle for longer are not reused.

vLLM's servers close idle connections after 5 s, and a request on one then breaks off.
"""

_log = logging.getLogger(__name__)


class ServerEngine:
    """Engine of servers that are already running.

    Args:
        urls: URLs of the servers.
        key: API key that they require, or None.
        folder: The run's own folder for weight versions. Servers see it under the same path, unless
            `server_transfer` is http; they are then sent the files.
        checkpoint: Checkpoint whose tokenizer decodes completions.
        options: Options of the run. If `max_staleness` is 2 or more, pending requests continue with
            the new weights at a publish; otherwise they finish first.
        learner: The run's name, unique among all runs on these servers.
        publishes: Whether this is the process of its run that publishes. The run's other processes
            rely on it.
        at_end: Callback that runs after `close`.

    Raises:
        EngineError: A server does not answer, refuses the key, lacks an endpoint, has other
            settings than `options`, or belongs to another run.
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
        self._begun_at: list[int] = []
        """Oldest version that may sample for each pending `generate`."""
        self._claimed: set[VllmReplica] = set()
        self._closed = False
        self._published = asyncio.Event()
        self._in_flight = rollout.max_staleness > 1
        self._sender = VersionSender(folder, rollout.server_full_every)
        self._publishes = publishes
        self._at_end = at_end
        self._options = options
        self._learner = learner
        self._transfer_name = learner if rollout.server_transfer == "http" else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._wait(_open_session(key))
        servers = [
            VllmReplica(url.rstrip("/"), self._session, rollout.server_seconds) for url in urls
        ]
        self._replicas = Replicas(servers, rollout.max_num_seqs)
        try:
            # Admit all before claiming any, so that no server is claimed in vain.
            for step in (self._admit, self._claim):
                self._wait(
                    await_all(self._replicas.with_retries(server, step) for server in servers)
                )
            self._tokenizer = load_tokenizer(checkpoint)
            self._vocabulary = Vocabulary.of(checkpoint)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """See `SamplingEngine.generate`.

        Prompt j goes to server j modulo the number of servers, or to the next one if that fails.
        """
        if not self._in_flight:
            self._require_published()
        self._require_rows([prompt.token_ids for prompt in prompts])
        sampling = sampling.with_stop_tokens(self._tokenizer)
        completions = self._wait(self._sample(prompts, sampling))
        samples = sampling.samples
        # With stop texts the server decodes, because it has to see them while it samples.
        if not sampling.stop:
            for i, completion in enumerate(completions):
                text = text_of(
                    self._tokenizer,
                    prompts[i // samples].token_ids,
                    completion.token_ids,
                    completion.finish_reason,
                )
                completions[i] = dataclasses.replace(completion, text=text)
        return [completions[i : i + samples] for i in range(0, len(completions), samples)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `SamplingEngine.logprobs`."""
        return self.logprobs_of_each(sequences)[0]

    def logprobs_of_each(
        self,
        sequences: Sequence[Sequence[int]],
    ) -> list[list[list[float]]]:
        """See `SamplingEngine.logprobs_of_each`."""
        self._require_published()
        self._require_rows(sequences)
        logprobs = self._wait(self._replicas.on_all(lambda server: self._score(server, sequences)))
        return list(logprobs.values())

    def layer_reports(self) -> list[LayerReport]:
        """See `SamplingEngine.layer_reports`.

        Raises `EngineError` if the servers' layers differ.
        """
        reports = self._wait(self._replicas.on_all(lambda server: server.layer_reports()))
        first, expected = next(iter(reports.items()))
        for server, layers in reports.items():
            if layers != expected:
                raise EngineError(
                    f"the servers at {first.url} and {server.url} have different layers; start both"
                    " alike"
                )
        return expected

    def load(self, stream: Iterable[LowBitTensor], version: int) -> LoadReport:
        """See `SamplingEngine.load`. The stream is written once and read by every server.

        Pending requests finish first, or continue with the new weights. A process that does not
        publish returns what it would have sent. Raises `DeltaError` if the stream has other tensors
        than the version before.
        """
        self._wait(self._set_publish_complete(False))
        if self._publishes:
            report, digest = self._publish(stream, version)
        else:
            self._wait(self._replicas.readmit(self._admit_quickly))
            report, digest = self._expected_report(stream)
        if report.took_all_of(digest):
            self.weight_version = version
            earlier = self._labels if self._in_flight else {}
            # Pending requests may still return tokens of earlier versions, and servers may still be
            # a version behind those processes that do not publish.
            oldest = min([*self._begun_at, version - 1])
            kept = {label: number for label, number in earlier.items() if number >= oldest}
            self._labels = kept | {_label(version, digest): version}
            self._wait(self._set_publish_complete(True))
        return report

    def shared_layers(self) -> None:
        """Return None, because the layers are in other processes."""

    def close(self) -> None:
        """Disconnect from the servers, which keep their weights. Pending requests are given up.

        A second call does nothing.
        """
        if self._loop.is_running():
            self._wait(self._disconnect())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if self._closed:
            return
        self._closed = True
        if self._publishes:
            self._sender.remove()
        self._at_end()

    def _publish(self, stream: Iterable[LowBitTensor], version: int) -> tuple[LoadReport, str]:
        """Publish a version and return the servers' report and the digest that was written."""
        try:
            digests = self._wait(self._cached_digests())
            written = self._sender.write(stream, version, digests)
            self._expect_pause(written.tensor_bytes)
            report = self._wait(self._publish_to_all(written))
        except EngineError as error:
            raise EngineError(
                f"weight version {version} did not reach all servers: {error}"
            ) from error
        self._sender.sent(version)
        return report, written.digest

    def _expected_report(self, stream: Iterable[LowBitTensor]) -> tuple[LoadReport, str]:
        """Return the report and digest that the publishing process gets if the publish succeeds."""
        digest = digested(stream)
        self._expect_pause(digest.bytes)
        return LoadReport(digest.hexdigest(), (), ()), digest.hexdigest()

    def _expect_pause(self, tensor_bytes: int) -> None:
        """Allow the pause of a publish of this size, by this process or by another one."""
        if self._in_flight:
            seconds = publish_timeout(tensor_bytes)
            self._loop.call_soon_threadsafe(self._replicas.allow_pauses, seconds)

    async def _cached_digests(self) -> list[str | None]:
        """Readmit lost servers, and return the digest that each worker holds, or None."""
        await self._replicas.readmit(self._admit_quickly, self._claim)
        by_server = await self._replicas.on_all(lambda server: server.held())
        return [digest for digests in by_server.values() for digest in digests]

    async def _publish_to_all(self, written: Version) -> LoadReport:
        """Publish a version to all servers. If they refuse a delta, publish the full version."""

        async def publish(version: Version) -> LoadReport:
            return await publish_files(
                self._replicas,
                version,
                _label(written.version, written.digest),
                keep=self._sender.keeps,
                in_flight=self._in_flight,
                run=self._transfer_name,
            )

        try:
            return await publish(written)
        except EngineError as error:
            if written.base is None:
                raise
            _log.warning(
                "the delta to weight version %d failed, so it is sent whole: %s",
                written.version,
                error,
            )
            return await publish(self._sender.write_whole())

    async def _admit_quickly(self, server: VllmReplica) -> None:
        """Admit a server within `_BACK_SECONDS`, else skip it. The next publish asks it again."""
        await server.admit(self._options, self._learner, _BACK_SECONDS)

    async def _admit(self, server: VllmReplica) -> None:
        await server.admit(self._options, self._learner)

    async def _claim(self, server: VllmReplica) -> None:
        if self._publishes:
            await server.claim(self._learner)
            self._claimed.add(server)

    async def _disconnect(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        releases = (
            server.release() for server in self._replicas.present() if server in self._claimed
        )
        await asyncio.gather(*releases, return_exceptions=True)
        await self._session.close()

    async def _sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
        """Sample every prompt, in order.

        An answer that arrives during a publish is read after it, when the new version's label is
        known.
        """
        await self._published.wait()
        salt = self._salt
        # The process that publishes may not have finished: servers may still be a version behind.
        oldest = self.weight_version if self._publishes else self.weight_version - 1

        def request(
            prompt: Prompt,
            j: int,
            k: int,
        ) -> Callable[[VllmReplica], Awaitable[Any]]:
            return lambda server: server.sample(prompt, sampling, j, k, salt)

        async def read(answer: Any, server: VllmReplica) -> Completion:
            await self._published.wait()
            labels = {
                label: version for label, version in self._labels.items() if version >= oldest
            }
            return server.read(answer, labels)

        requests = []
        for j, prompt in enumerate(prompts):
            number = prompt.draws[0] if prompt.draws else sampling.first_prompt + j
            requests += [(number, request(prompt, j, k)) for k in range(sampling.samples)]
        self._begun_at.append(oldest)
        try:
            return await self._replicas.dispatch(requests, read)
        finally:
            self._begun_at.remove(oldest)

    async def _score(
        self, server: VllmReplica, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        salt = self._salt
        labels = {salt: self.weight_version}
        return await await_all(server.logprobs(sequence, salt, labels) for sequence in sequences)

    async def _set_publish_complete(self, complete: bool) -> None:
        """Record whether servers now sample with the version published last.

        Must run in the thread of the event loop.
        """
        if complete:
            self._replicas.all_are_current()
            self._published.set()
        else:
            self._published.clear()

    @property
    def _salt(self) -> str:
        """Salt of prefix caches: the label of the version published last."""
        return next(reversed(self._labels))

    def _require_rows(self, sequences: Sequence[Sequence[int]]) -> None:
        self._vocabulary.require(sequences, "a sequence for the engine", self._tokenizer)

    def _require_published(self) -> None:
        if not self._published.is_set():
            raise EngineError(
                "the last publish did not reach all servers, or there was none; publish again"
            )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread's event loop and return its result.

        Raises `EngineError` if the engine is closed meanwhile.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError as error:
            raise EngineError("the servers were released while they sampled") from error


async def _open_session(key: str | None) -> aiohttp.ClientSession:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    return aiohttp.ClientSession(headers=headers, connector=connector)


def _label(version: int, digest: str) -> str:
    """Return the label by which servers report the weights that sampled a token.

    It includes the digest, so that versions of two runs are never confused.
    """
    return f"{version}-{digest}"
