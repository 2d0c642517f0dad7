"""`qarl serve` over HTTP: greedy completions equal the engine's, and a kill ends all processes."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from qarl.quant.kernels import vllm_cpu
from qarl.rollout.servers.vllm.start import free_ports
from qarl.rollout.types import Prompt, Sampling
from tests.support import Policies
from tests.support.engines import SEQUENCES, disturb, make_model, start_engine
from tests.support.profiles import thorough
from tests.support.serving import request, server

_NEW_TOKENS = 12


def test_a_served_export_answers_with_the_engines_tokens(random_policy: Policies, tmp_path: Path):
    """Blind spot: one request at a time; a batch of the server's own making may round otherwise."""
    folder = random_policy(True)
    export = tmp_path / "an export"
    model = make_model(folder, "w4a16")
    disturb(model, 0)
    engine = start_engine(model, folder, export)
    with server(export) as (url, process):
        sampling = Sampling(samples=1, max_new_tokens=_NEW_TOKENS, temperature=0.0)
        answers = [engine.generate([Prompt("p", "", tuple(s))], sampling)[0][0] for s in SEQUENCES]
        engine.close()
        assert process.stdout is not None
        assert process.stdout.readline().startswith("starting vLLM")
        assert f"{url}/v1, model 'an export'" in process.stdout.readline(), "that it is ready"
        assert [model["id"] for model in request(f"{url}/v1/models")["data"]] == ["an export"]
        for sequence, answer in zip(SEQUENCES, answers, strict=True):
            body = {
                "model": "an export",
                "prompt": sequence,
                "max_tokens": _NEW_TOKENS,
                "temperature": 0,
            }
            (choice,) = request(f"{url}/v1/completions", body | {"return_token_ids": True})[
                "choices"
            ]
            assert choice["token_ids"] == list(answer.token_ids)
        process.kill()
        process.wait()
        assert _ends(process.pid), "a process of the server is left"
    if thorough():  # starts a server of its own
        assert_the_example_asks(export)


def test_an_interrupt_while_an_engine_starts_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
):
    """Check an interrupt that vLLM drops, and then waits for an engine that it may have ended."""
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    monkeypatch.setattr(utils, "zmq_socket_ctx", utils.zmq_socket_ctx)  # and back
    vllm_cpu._end_where_interrupted()
    with (
        pytest.raises(SystemExit, match="130"),
        utils.zmq_socket_ctx("inproc://started", zmq.ROUTER, bind=True),
    ):
        raise KeyboardInterrupt


def assert_the_example_asks(export: Path) -> None:
    """Check that examples/serve_export.sh serves, gets an answer, and leaves nothing running."""
    script = Path(__file__).parents[2] / "examples/serve_export.sh"
    port = free_ports(1)[0]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(script), str(export), str(port)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0 and len(answer["choices"]) == 1, done.stdout + done.stderr
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the server is left"


def _ends(session: int, patience: float = 10.0) -> bool:
    """Return whether every process of a session ends within `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
