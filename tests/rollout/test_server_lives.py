"""Runs on two servers, from claim to release: what is asked of each server, and what remains.

Our side of a server is real: middleware, worker and version files. HTTP is passed to it within this
process. Blind spots: vLLM (tests/engine) and the network (test_replicas.py).
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse

from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.delta import DeltaError
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.absent import AbsentEngine
from qarl.rollout.engine import EngineError, LoadReport, LostServerError
from qarl.rollout.servers import engine, replicas
from qarl.rollout.servers.vllm import access, client, receive, replica, start, worker
from qarl.rollout.types import Completion, Prompt, Sampling, ServerSpec
from qarl.rollout.vllm.options import VllmOptions
from tests.support.servers import altered

KEY = "secret"
GENERATE = "/inference/v1/generate"
JOIN = ["qarl_state", "qarl_claim"]
READ = ["qarl_abandon", "qarl_stage"]
COMMIT = ["/pause?mode=wait", "qarl_load_staged", "/update_weight_version", "/resume"]
PUBLISH = ["qarl_state", *READ, *COMMIT]
WHOLE = ["manifest.json", "tensors-0.safetensors"]
DELTA = ["delta", "manifest.json"]
VALUES = 4096
"""Values of a layer."""
VERSION_BYTES = 2 * VALUES * 4
BYTES_PER_SECOND = 50e6
"""Slowest transfer of a version that is waited for, beyond 30 s."""
UNSETTLED = "the last publish did not reach all servers, or there was none; publish again"


class StandIn(worker.ServerExtension):
    """Server with two workers and a model of layers a and b, behind QaRL's middleware."""

    def __init__(self, received: Path, patch: pytest.MonkeyPatch):
        patch.setenv(receive.RECEIVED, str(received))
        self.received = received
        """Folder of the versions that are sent over HTTP."""
        self.refusals = list[str]()
        """Methods and paths that are refused, each once."""
        self.failures = list[str]()
        """Methods and paths that fail, each once."""
        self.misreads = False
        """Whether staging finds another digest than the announced one."""
        self.scheme = "int4"
        """Scheme of the layers, for the audit."""
        self.label = "default"
        """Weight version that the server names with each token."""
        settings: Any = SimpleNamespace(max_model_len=100, logprobs_mode="raw_logprobs")
        ranks = SimpleNamespace(tensor_parallel_size=1, enable_expert_parallel=False)
        self.vllm_config = SimpleNamespace(  # type: ignore[assignment]
            model_config=settings, parallel_config=ranks
        )
        self.model_runner = SimpleNamespace(get_model=list)  # type: ignore[assignment]
        self.app = Starlette(
            middleware=[Middleware(access.RequireKey), Middleware(receive.ReceiveVersions)]
        )
        self.app.add_route("/{path:path}", self.answer, ["POST"])
        self.app.state.engine_client = self
        # Starlette builds it at the first request, when the environment is the other server's.
        self.app.middleware_stack = self.app.build_middleware_stack()

    @property
    def held(self) -> str | None:
        """Digest of the version that the next may be a delta from."""
        return self.qarl_state()["held"]

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Return the answers of both workers."""
        answer = getattr(self, method)(**arguments)
        while method == "qarl_stage" and answer is None:  # its thread is not done
            time.sleep(0.001)
            answer = getattr(self, method)(**arguments)
        return [answer, answer]

    def qarl_stage(self, **announced: Any) -> dict[str, Any] | None:
        """Stage a version, and report another digest if the server misreads."""
        report = super().qarl_stage(**announced)
        return report | {"digest": "other"} if report and self.misreads else report

    def qarl_layers(self) -> list[LayerReport]:
        """Return one layer of the server's scheme."""
        return [LayerReport("a", self.scheme, 16, "bfloat16", "k")]

    async def answer(self, request: Request) -> JSONResponse:
        """Refuse, fail, call the workers or return a completion of the present version."""
        body = json.loads(await request.body())
        method = body.get("method", request.url.path)
        for methods, status in ((self.refusals, 400), (self.failures, 500)):
            if method in methods:
                methods.remove(method)
                return JSONResponse(f"no {method}", status)
        if "method" in body:
            results = await self.collective_rpc(method, **body["kwargs"])
            return JSONResponse({"results": results})
        self.label = body.get("new_version", self.label)
        length = body.get("sampling_params", {}).get("max_tokens")
        completion = altered(weight_versions=[{"version": self.label, "start": 0, "end": length}])
        return JSONResponse(completion | {"output_mode": body.get("output_mode")})


@dataclass(frozen=True)
class Event:
    """Request of the run to a server."""

    server: str
    """Number of the server."""
    name: str
    """Method of the workers, or path with its query."""
    seconds: float
    """Timeout."""
    content: dict[str, Any]
    """Arguments of the method, or body; {} for a file."""
    headers: dict[str, str]
    """Headers of the session."""


class Life:
    """Processes of a run that share two servers, "0" and "1".

    Everything that the run asks, warns of and writes can be read; servers can be made to fail.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.folder = folder
        self.requests = list[Event]()
        """Requests of the run, in order for each server."""
        self.warnings = list[str]()
        """Warnings of the run."""
        self.pauses = list[tuple[str, float]]()
        """Servers that may pause while they sample, each with the seconds."""
        self.ends = 0
        """How often a process of the run had its servers ended."""
        self.settings: dict[str, Any] = {
            "max_prompt_tokens": 60,
            "max_new_tokens": 40,
            "server_full_every": 100,
        }
        self._patch = patch
        self._lost = dict[str, float]()
        self._engines = list[engine.ServerEngine]()
        self._patch_far_end()
        self.servers = {number: self._started(number) for number in "01"}

    # Servers

    def lose(self, *numbers: str, requests: float = float("inf")) -> None:
        """Break off the servers' answers to the next requests."""
        self._lost.update(dict.fromkeys(numbers, requests))

    def find(self) -> None:
        """Let all lost servers answer again."""
        self._lost.clear()

    def restart(self, number: str) -> None:
        """Replace a server by one that has no version and no learner."""
        self.servers[number] = self._started(number)

    def _started(self, number: str) -> StandIn:
        return StandIn(self.folder / f"received-{number}", self._patch)

    # Run

    def join(
        self, key: str = KEY, learner: str = "run", publishes: bool = True, **settings: Any
    ) -> None:
        """Start a process of a run, which all later steps are of."""
        rollout = RolloutConfig(servers=("http://0", "http://1"), **self.settings | settings)
        urls = ["http://0/", "http://1/"]
        versions = self.folder / "versions"
        options = VllmOptions(rollout)
        self._engines.append(
            engine.ServerEngine(
                urls, key, versions, self.folder, options, learner, publishes, self._end
            )
        )

    def publish(self, version: int, *more: str, random: bool = False) -> LoadReport:
        """Publish layers a, b and more, of `VALUES` int32 values each.

        Versions differ in one or two values, and in all of them if they are random.
        """
        values = torch.arange(VALUES, dtype=torch.int32)
        values[version] += version
        if random:
            generator = torch.Generator().manual_seed(version)
            values = torch.randint(
                2**31 - 1,
                (VALUES,),
                generator=generator,
                dtype=torch.int32,
            )
        stream = (LowBitTensor(f"{name}.weight", values.clone()) for name in ("a", "b", *more))
        return self._engines[-1].load(stream, version)

    def sample(self, *stop: str) -> list[list[Completion]]:
        """Sample prompts a, b and c twice. a and c begin with server 0, and b with server 1."""
        prompts = [
            Prompt("a", "", (1, 2)),
            Prompt("b", "", (3,), (7, 8, 9)),
            Prompt("c", "", (4, 5, 6)),
        ]
        sampling = Sampling(samples=2, max_new_tokens=2, seed=5, first_prompt=4, stop=stop)
        return self._engines[-1].generate(prompts, sampling)

    def score(self, *sequences: list[int]) -> list[list[list[float]]]:
        """Return every server's log-probs of each sequence."""
        return self._engines[-1].logprobs_of_each(sequences)

    def audit(self) -> list[LayerReport]:
        """Return the layers of all servers."""
        return self._engines[-1].layer_reports()

    def leave(self) -> None:
        """End the process that joined last."""
        self._engines.pop().close()

    def close(self) -> None:
        """End all processes that are left."""
        while self._engines:
            self.leave()

    def _end(self) -> None:
        self.ends += 1

    # What can be read

    def names(self, number: str) -> list[str]:
        """Return the names of the requests to a server."""
        return [event.name for event in self.requests if event.server == number]

    def timeouts(self, name: str) -> set[float]:
        """Return the timeouts of requests of that name, in seconds."""
        return {event.seconds for event in self.requests if event.name == name}

    def prompts(self, number: str) -> list[list[int]]:
        """Return the prompts that a server was asked to sample, sorted."""
        bodies = (e.content for e in self.requests if (e.server, e.name) == (number, GENERATE))
        return sorted(body["token_ids"] for body in bodies)

    def labels(self) -> list[str]:
        """Return the versions that the servers say they sample by."""
        return [server.label for server in self.servers.values()]

    def learners(self) -> list[str]:
        """Return the runs that the servers belong to, "" for none."""
        return [server.qarl_learner for server in self.servers.values()]

    def files(self, version: int) -> list[str]:
        """Return the names of a version's files, if the run's folder has no other version."""
        (folder,) = (self.folder / "versions").iterdir()
        assert folder.name == f"version-{version}"
        return sorted(file.name for file in folder.iterdir())

    # Stand-ins for the network, the tokenizer and the model

    async def _request(
        self, server: client.Server, kind: str, path: str, seconds: float, **content: Any
    ) -> Any:
        number = server.url.removeprefix("http://")
        headers = dict(server._session.headers)
        body = content.get("json", {})
        name = body.get("method", path)
        self.requests.append(Event(number, name, seconds, body.get("kwargs", body), headers))
        if self._lost.get(number, 0) > 0:
            self._lost[number] -= 1
            raise client.BrokenAnswerError(f"{server.url} is absent")
        data = {"content": content["data"].read()} if "data" in content else content
        transport = httpx.ASGITransport(self.servers[number].app)
        async with httpx.AsyncClient(transport=transport, headers=headers) as session:
            answer = await session.request(kind, f"{server.url}{path}", **data)
        if answer.status_code != 200:
            raise server._refused(path.partition("?")[0], answer.status_code, answer.text)
        return answer.json()

    def _patch_far_end(self) -> None:
        patch = self._patch
        log = SimpleNamespace(warning=lambda words, *fields: self.warnings.append(words % fields))
        load = AbsentEngine().load
        patch.setenv("VLLM_API_KEY", KEY)
        patch.setenv(start.ON_CPU, "1")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(engine, "_log", log)
        patch.setattr(replicas, "_log", log)
        patch.setattr(replicas, "_PAUSE_SECONDS", 0.001)
        patch.setattr(
            client.Server, "_request", lambda server, *a, **k: self._request(server, *a, **k)
        )
        patch.setattr(
            replica.VllmReplica,
            "allow_pause",
            lambda server, seconds: self.pauses.append((server.url, seconds)),
        )
        patch.setattr(engine, "load_tokenizer", lambda checkpoint: "tokenizer")
        patch.setattr(engine, "text_of", lambda *arguments: str(arguments))
        patch.setattr(worker, "trace_names", lambda model, _config: model.extend("ab"))
        patch.setattr(worker, "checkpoint_names", lambda model: {0: [*model]})
        patch.setattr(worker, "load_stream", lambda _model, _config, stream: load(stream, 0))


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Two servers that no run has joined."""
    life = Life(tmp_path, monkeypatch)
    yield life
    life.close()


@pytest.fixture
def published(life: Life) -> Life:
    """Run that has published version 1; requests until then are forgotten."""
    life.join()
    life.publish(1)
    life.requests.clear()
    return life


def refused(message: str, kind: type[Exception] = EngineError) -> AbstractContextManager[Any]:
    """Expect an error that is exactly this message."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


# Joining


def test_a_run_claims_its_servers_before_it_publishes(life: Life):
    life.join()
    assert life.names("0") == JOIN
    assert life.names("1") == JOIN
    assert life.learners() == ["run", "run"]
    assert {event.headers["Authorization"] for event in life.requests} == {"Bearer secret"}
    with refused(UNSETTLED):
        life.sample()
    with refused(UNSETTLED):
        life.score([1, 7])


def test_a_second_learner_is_refused_until_the_first_leaves(life: Life):
    life.join()
    with refused(
        "the server at http://0 takes its weights from run; end that run, or give this one servers"
        " of its own (restart the server where that run is gone for good)"
    ):
        life.join(learner="another")
    assert life.learners() == ["run", "run"]
    assert life.ends == 1
    life.leave()
    life.join(learner="another")
    assert life.learners() == ["another", "another"]


def test_another_key_is_refused(life: Life):
    with refused(
        "the server at http://0 refused the API key; give the one it was started with, in a file"
        " (rollout.server_key_file) or in the environment (QARL_SERVER_KEY)"
    ):
        life.join(key="guess")
    assert life.learners() == ["", ""]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"temperature": 0.5},
            "the server at http://0 gives raw_logprobs, and rollout.temperature needs"
            " processed_logprobs; start it with --logprobs-mode processed_logprobs",
        ),
        (
            {"max_new_tokens": 41},
            "the server at http://0 takes 100 tokens, and rollout.max_prompt_tokens +"
            " rollout.max_new_tokens are 101; start it with --max-model-len 101",
        ),
        (
            {"tensor_parallel_size": 2},
            "the server at http://0 has 1 ranks, and rollout.tensor_parallel_size is 2, by which"
            " the learner sums; start it with --rollout.tensor_parallel_size 2, or give the run"
            " that of the server",
        ),
    ],
)
def test_servers_with_other_settings_are_refused(life: Life, setting: Any, message: str):
    with refused(message):
        life.join(**setting)
    assert life.learners() == ["", ""]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"learner": "another run"}, "the server at http://1 takes its weights from another run; "),
        ({"max_model_len": 99}, "the server at http://1 takes 99 tokens, and "),
    ],
)
def test_the_state_of_every_worker_of_a_server_counts(life: Life, state: Any, message: str):
    server = life.servers["1"]
    both = server.collective_rpc

    async def differing(method: str, **arguments: Any) -> list[Any]:
        first, second = await both(method, **arguments)
        return [first, second | state] if method == "qarl_state" else [first, second]

    server.collective_rpc = differing  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=f"^{message}"):
        life.join()
    assert life.learners() == ["", ""]


def test_no_server_is_claimed_if_one_is_absent(life: Life):
    life.lose("0")
    with refused("http://0 is absent", LostServerError):
        life.join()
    assert life.names("0") == ["qarl_state"] * 3
    assert life.learners() == ["", ""]
    assert life.ends == 1


def test_a_late_server_is_asked_again(life: Life):
    life.lose("1", requests=2)
    life.join()
    assert life.warnings == ["http://1 is absent; trying again"] * 2
    assert life.names("1") == ["qarl_state", "qarl_state", *JOIN]
    assert life.learners() == ["run", "run"]


# Publishing


def test_the_first_version_is_whole_and_later_ones_are_deltas(life: Life):
    life.join()
    life.requests.clear()
    for version, files in ((1, WHOLE), (2, DELTA), (3, DELTA)):
        report = life.publish(version)
        assert report.unconsumed == ()
        assert report.missing == ()
        assert life.labels() == [f"{version}-{report.digest}"] * 2
        assert life.servers["0"].held == report.digest
        assert life.files(version) == files
    assert life.names("0") == PUBLISH * 3
    assert life.names("1") == PUBLISH * 3
    assert life.warnings == []


def test_servers_are_told_folder_digest_and_size_of_a_version(life: Life):
    life.join()
    report = life.publish(1)
    stage = next(event for event in life.requests if event.name == "qarl_stage")
    assert stage.content == {
        "folder": str(life.folder / "versions/version-1"),
        "digest": report.digest,
        "tensor_bytes": VERSION_BYTES,
        "keep": True,
    }
    load = next(event for event in life.requests if event.name == "qarl_load_staged")
    assert load.content == {"digest": report.digest}


def test_every_third_version_is_whole_with_server_full_every_3(life: Life):
    life.join(server_full_every=3)
    files = []
    for version in range(1, 8):
        life.publish(version)
        files.append(life.files(version))
    assert files == [WHOLE, DELTA, DELTA, WHOLE, DELTA, DELTA, WHOLE]


def test_every_version_is_whole_and_none_is_held_with_server_full_every_1(life: Life):
    life.join(server_full_every=1)
    for version in (1, 2):
        life.publish(version)
        assert life.files(version) == WHOLE
        assert life.servers["0"].held is None


def test_a_delta_larger_than_the_version_is_sent_whole(published: Life):
    published.publish(2, random=True)
    assert published.files(2) == WHOLE
    assert published.warnings == []


def test_a_refused_delta_is_followed_by_the_whole_version(published: Life):
    published.servers["0"].refusals = ["qarl_stage"]
    report = published.publish(2)
    assert published.warnings == [
        "the delta to weight version 2 failed, so it is sent whole: the server at http://0 refused"
        ' /collective_rpc (HTTP 400): "no qarl_stage"'
    ]
    assert published.names("0") == ["qarl_state", *READ, *READ, *COMMIT]
    assert published.files(2) == WHOLE
    assert published.labels() == [f"2-{report.digest}"] * 2


def test_a_publish_fails_if_the_whole_version_is_refused_too(published: Life):
    published.servers["0"].refusals = ["/pause", "qarl_load_staged"]
    with refused(
        "weight version 2 did not reach all servers: the server at http://0 refused /collective_rpc"
        ' (HTTP 400): "no qarl_load_staged"'
    ):
        published.publish(2)
    assert len(published.warnings) == 1
    assert [label[:2] for label in published.labels()] == ["1-", "2-"]
    report = published.publish(3)
    assert published.labels() == [f"3-{report.digest}"] * 2


def test_a_server_that_refuses_a_version_gets_it_at_the_next_publish(life: Life):
    life.join()
    life.servers["1"].refusals = ["qarl_load_staged"]
    with refused(
        "weight version 1 did not reach all servers: the server at http://1 refused /collective_rpc"
        ' (HTTP 400): "no qarl_load_staged"'
    ):
        life.publish(1)
    assert [label[:2] for label in life.labels()] == ["1-", "de"]
    with refused(UNSETTLED):
        life.sample()
    report = life.publish(1)
    assert life.files(1) == WHOLE
    assert life.labels() == [f"1-{report.digest}"] * 2
    assert [one[0].weight_version for one in life.sample()] == [1, 1, 1]


def test_a_version_is_loaded_nowhere_if_one_server_reads_another_digest(published: Life):
    before = published.labels()
    published.servers["1"].misreads = True
    assert published.publish(2).digest == "other"
    assert published.names("0") == ["qarl_state", *READ, "qarl_abandon"]
    assert published.labels() == before
    with refused(UNSETTLED):
        published.sample()
    published.servers["1"].misreads = False
    report = published.publish(3)
    assert published.files(3) == WHOLE, "the servers hold neither version for sure"
    assert published.labels() == [f"3-{report.digest}"] * 2


def test_a_version_is_loaded_nowhere_if_the_model_lacks_a_layer_of_it(life: Life):
    life.join()
    report = life.publish(1, "x")
    assert report.unconsumed == ("x",)
    assert life.labels() == ["default", "default"]
    with refused(UNSETTLED):
        life.score([1, 7])


def test_other_tensors_than_before_are_refused_and_the_next_version_is_whole(published: Life):
    with refused(
        "'x.weight' came where version 1 has 'nothing more'; send the whole version", DeltaError
    ):
        published.publish(2, "x")
    assert published.names("0") == ["qarl_state"]
    published.publish(3)
    assert published.files(3) == WHOLE


def test_versions_are_sent_over_http_to_servers_without_the_runs_files(life: Life):
    life.join(server_transfer="http")
    for version, files in ((1, WHOLE), (2, DELTA)):
        life.requests.clear()
        life.publish(version)
        manifest_first = sorted(files, key="manifest.json".__ne__)
        uploads = [f"/qarl/versions/{version}/{file}?run=run" for file in manifest_first]
        assert life.names("0") == ["qarl_state", *uploads, *READ, *COMMIT]
        stages = [event for event in life.requests if event.name == "qarl_stage"]
        assert {event.content["folder"] for event in stages} == {
            str(life.folder / f"received-{number}/version-{version}") for number in "01"
        }
        file = life.folder / f"versions/version-{version}" / manifest_first[1]
        both_servers = 2 * file.stat().st_size
        assert life.timeouts(uploads[1]) == {30.0 + both_servers / BYTES_PER_SECOND}
        received = life.servers["1"].received / f"version-{version}"
        assert sorted(file.name for file in received.iterdir()) == files


def test_requests_go_on_through_a_publish_with_max_staleness_2(life: Life):
    life.join(max_staleness=2)
    life.publish(1)
    assert "/pause?mode=keep" in life.names("0")
    seconds = 30.0 + VERSION_BYTES / BYTES_PER_SECOND
    assert life.pauses == [("http://0", seconds), ("http://1", seconds)]


def test_labels_are_forgotten_once_no_pending_request_can_return_them(life: Life):
    """Contract: with max_staleness 2 a completion may name every version since it was begun."""
    life.join(max_staleness=2)
    one = life._engines[-1]
    for version in range(1, 5):
        life.publish(version)
    assert [*one._labels.values()] == [3, 4]
    dispatch = one._replicas.dispatch

    async def publishing(requests: Any, read: Any) -> list[Completion]:
        for version in (5, 6, 7):
            await asyncio.to_thread(life.publish, version)
        return await dispatch(requests, read)

    one._replicas.dispatch = publishing  # type: ignore[method-assign]
    life.sample()
    assert [*one._labels.values()] == [4, 5, 6, 7]
    life.publish(8)
    assert [*one._labels.values()] == [7, 8]


def test_another_process_of_the_run_sends_nothing_and_counts_the_same(published: Life):
    report = published.publish(2)
    published.join(publishes=False)
    published.requests.clear()
    assert published.publish(2) == report
    assert published.requests == []
    assert [one[0].weight_version for one in published.sample()] == [2, 2, 2]
    published.leave()
    assert published.learners() == ["run", "run"]
    assert published.files(2) == DELTA


def test_another_process_takes_a_lost_server_back_without_a_claim(published: Life):
    published.join(publishes=False)
    published.publish(1)
    published.restart("1")
    published.sample()  # which finds that server 1 has other weights
    published.requests.clear()
    published.publish(1)
    assert published.names("0") == []
    assert published.names("1") == ["qarl_state"]


# Sampling, scoring and audit


def test_prompts_are_dealt_to_the_servers_and_texts_are_made_by_the_run(published: Life):
    completions = published.sample()
    assert published.prompts("0") == [[1, 2], [1, 2], [4, 5, 6], [4, 5, 6]]
    assert published.prompts("1") == [[3], [3]]
    assert {event.content["output_mode"] for event in published.requests} == {"tokens"}
    assert {event.content["cache_salt"] for event in published.requests} == {published.labels()[0]}
    assert [[one.text for one in samples] for samples in completions] == [
        [str(("tokenizer", prompt, (5, 6), "stop"))] * 2 for prompt in ((1, 2), (3,), (4, 5, 6))
    ]
    assert completions[0][0].token_ids == (5, 6)
    assert completions[0][0].logprobs == (-0.5, -1.25)


def test_servers_look_for_stop_texts_and_send_texts_then(published: Life):
    completions = published.sample("#")
    assert {one.text for samples in completions for one in samples} == {"ab"}
    bodies = [event.content for event in published.requests]
    assert {body["output_mode"] for body in bodies} == {"text"}
    assert [body["sampling_params"]["stop"] for body in bodies] == [["#"]] * 6


def test_other_servers_take_the_prompts_of_one_lost_while_sampling(published: Life):
    published.lose("1")
    completions = published.sample()
    assert [len(samples) for samples in completions] == [2, 2, 2]
    assert published.prompts("0") == [[1, 2], [1, 2], [3], [3], [4, 5, 6], [4, 5, 6]]
    assert published.prompts("1") == [[3], [3]]


def test_a_restarted_server_samples_nothing_until_it_has_the_whole_version(published: Life):
    published.restart("1")
    published.sample()
    assert published.warnings == [
        "the server at http://1 sampled tokens 0 to 2 by 'default', and not all by"
        f" '{published.labels()[0]}', which was published last: another run publishes to it, or it"
        " was restarted; give every run servers of its own; going on with 1 of 2 servers"
    ]
    assert published.prompts("0") == [[1, 2], [1, 2], [3], [3], [4, 5, 6], [4, 5, 6]]
    published.requests.clear()
    report = published.publish(2)
    assert published.warnings[1:] == [
        "the server at http://1 answers again, and takes part in this publish"
    ]
    assert published.names("1") == [*JOIN, *PUBLISH]
    assert published.files(2) == WHOLE
    assert published.labels() == [f"2-{report.digest}"] * 2
    published.requests.clear()
    published.sample()
    assert published.prompts("1") == [[3], [3]]


def test_a_server_lost_at_a_publish_gets_a_whole_version_when_it_is_back(published: Life):
    published.lose("1")
    published.publish(2)
    assert published.files(2) == DELTA
    assert published.warnings[-1] == "http://1 is absent; going on with 1 of 2 servers"
    published.find()
    report = published.publish(3)
    assert published.files(3) == WHOLE
    assert published.labels() == [f"3-{report.digest}"] * 2


def test_a_lost_server_that_another_run_claimed_stays_left_out(published: Life):
    published.lose("1")
    published.publish(2)
    published.find()
    published.restart("1")
    published.servers["1"].qarl_claim("another")
    published.requests.clear()
    published.publish(3)
    assert published.names("1") == ["qarl_state"]
    assert published.learners() == ["run", "another"]
    assert published.labels()[1] == "default"


def test_an_error_names_both_servers_if_both_are_lost(published: Life):
    published.lose("0", "1")
    both = "no server is left: http://0 is absent; http://1 is absent; start one and resume the run"
    with refused(f"weight version 2 did not reach all servers: {both}"):
        published.publish(2)
    assert published.names("0") == ["qarl_state"] * 3
    published.requests.clear()
    with refused(f"weight version 2 did not reach all servers: {both}"):
        published.publish(2)
    assert published.names("0") == ["qarl_state"], "a lost server is asked once"
    published.find()
    report = published.publish(3)
    assert published.labels() == [f"3-{report.digest}"] * 2


def test_every_server_scores_every_sequence(published: Life):
    assert published.score([1, 7], [4, 7]) == [[[-0.5], [-0.5]]] * 2
    assert published.prompts("0") == [[1, 7], [4, 7]]
    assert published.prompts("1") == [[1, 7], [4, 7]]


def test_an_audit_is_of_layers_that_all_servers_have(published: Life):
    assert published.audit() == [LayerReport("a", "int4", 16, "bfloat16", "k")]
    assert published.names("0") == ["qarl_layer_reports"]
    assert published.names("1") == ["qarl_layer_reports"]
    published.servers["1"].scheme = "int8"
    with refused("the servers at http://0 and http://1 have different layers; start both alike"):
        published.audit()
    published.lose("1")
    assert published.audit() == [LayerReport("a", "int4", 16, "bfloat16", "k")]


def test_servers_that_fail_are_asked_three_times(published: Life):
    published.servers["0"].failures = ["qarl_layer_reports"] * 2
    published.audit()
    failed = 'failed at /collective_rpc (HTTP 500): "no qarl_layer_reports"'
    assert published.warnings == [f"the server at http://0 {failed}; trying again"] * 2
    for server in published.servers.values():
        server.failures = ["qarl_layer_reports"] * 3
    with refused(f"the server at http://0 {failed}; the server at http://1 {failed}"):
        published.audit()


def test_timeouts_fit_what_is_asked(published: Life):
    published.publish(2)
    published.sample()
    assert published.timeouts("qarl_state") == {30.0}
    assert published.timeouts("qarl_stage") == {30.0}, "it answers at once, and is asked again"
    assert published.timeouts("/pause?mode=wait") == {600.0}, "as long as a pending request"
    assert published.timeouts("qarl_load_staged") == {30.0 + VERSION_BYTES / BYTES_PER_SECOND}
    assert published.timeouts(GENERATE) == {600.0}
    published.lose("1")
    published.publish(3)
    published.requests.clear()
    published.publish(4)
    assert [event.seconds for event in published.requests if event.server == "1"] == [3.0]


# Leaving


def test_a_run_that_leaves_releases_its_servers_and_removes_its_files(published: Life):
    label = published.labels()[0]
    published.leave()
    assert published.names("0") == ["qarl_release"]
    assert published.names("1") == ["qarl_release"]
    assert published.learners() == ["", ""]
    assert published.servers["0"].held is None
    assert published.labels() == [label, label], "they go on with the weights they have"
    assert list(published.folder.iterdir()) == []
    assert published.ends == 1


def test_a_second_close_does_nothing(published: Life):
    """Contract: what ends the servers runs once, because their process numbers may be others'."""
    one = published._engines[-1]
    one.close()
    published.requests.clear()
    one.close()
    assert published.ends == 1
    assert published.requests == []


# Commands


@pytest.mark.parametrize(("length", "options"), [((), []), ((77,), ["--max-model-len", "77"])])
def test_the_command_of_a_server(
    life: Life, tmp_path: Path, length: tuple[int, ...], options: list[str]
):
    command = start.server_command(
        ServerSpec(tmp_path, "n", "half", *length),
        "h",
        1,
        ["-x"],
    )
    assert command == [
        sys.executable,
        *("-W", "ignore::DeprecationWarning"),
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(tmp_path)),
        *("--served-model-name", "n"),
        *("--dtype", "half"),
        *options,
        "--enforce-eager",
        *("--kv-cache-memory-bytes", str(2**30)),
        *("--host", "h"),
        *("--port", "1"),
        *("--disable-access-log-for-endpoints", "/health"),
        "-x",
    ]


def test_the_command_of_a_replica_adds_the_runs_settings_and_the_middleware(life: Life):
    (life.folder / "config.json").write_text("{}")
    served = ServerSpec(life.folder, "policy", "bfloat16")
    before = start.server_command(served, "h", 1, [])
    command = start.replica_command(life.folder, VllmOptions(), "h", 1, ["-x"])
    assert command[: len(before)] == before
    assert command[len(before) :] == [
        *("--dtype", "bfloat16"),
        "--enforce-eager",
        *("--max-model-len", "2048"),
        *("--max-num-seqs", "256"),
        *("--kv-cache-memory-bytes", str(2**30)),
        *("--gpu-memory-utilization", "0.01"),
        "--enable-prefix-caching",
        "--disable-log-stats",
        "--no-enable-return-routed-experts",
        *("--logprobs-mode", "raw_logprobs"),
        "--no-enable-chunked-prefill",
        *("--max-num-batched-tokens", "8192"),
        *("--tensor-parallel-size", "1"),
        "--enable-scale-out",
        *("--uvicorn-log-level", "warning"),
        *("--worker-extension-cls", "qarl.rollout.servers.vllm.worker.ServerExtension"),
        # The last middleware is asked first: no file is taken without the key.
        *("--middleware", "qarl.rollout.servers.vllm.receive.ReceiveVersions"),
        *("--middleware", "qarl.rollout.servers.vllm.access.RequireKey"),
        "-x",
    ]
