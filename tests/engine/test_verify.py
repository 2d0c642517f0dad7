"""`qarl.verify.weights` of a running vLLM, whose kernels have repacked the weights.

Tensor-parallel ranks are compared in tests/qarl/test_verify_ranks.py. Blind spot: CPUs only.
"""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qarl
from qarl.cli.main import main
from qarl.verify.server import VllmServer
from tests.support import Policies
from tests.support.drawn_checkpoints import read, write
from tests.support.engines import make_model, start_engine
from tests.support.serving import server, wait

EXTENSION = ("--worker-extension-cls", "qarl.verify.HeldWeights")


@pytest.mark.parametrize("tied", [True, False])
def test_a_running_engine_is_compared_with_masters(
    tied: bool, random_policy: Policies, tmp_path: Path
):
    """Contract: of the trainer's masters every matrix is the engine's, and one that moved by 5 % of
    its spread is named.
    """
    folder = random_policy(tied)
    engine = start_engine(make_model(folder, "w4a16"), folder, tmp_path / "export")
    report = qarl.verify.weights(folder, engine._llm)
    masters = read(folder)
    layer = "model.layers.1.mlp.up_proj"
    weight = masters[f"{layer}.weight"]
    masters[f"{layer}.weight"] = weight + 0.05 * weight.std() * weight.sign()
    (cause,) = qarl.verify.weights(masters, engine._llm).faults
    engine.close()
    assert report.agrees, report.lines()
    quantized = [each for each in report.layers if each.engine_scheme != "unquantized"]
    assert {each.state for each in quantized} == {
        "codes of these masters, as the engine multiplies"
    }
    assert len(quantized) == 14  # two decoder layers of q, k, v, o, gate, up, down
    assert any(each.name == "model.embed_tokens" for each in report.layers)
    assert (cause.name, cause.about) == ("stale", (layer,))


@pytest.mark.parametrize("scheme", ["bf16", "w8a8"])
def test_a_running_engines_experts_are_compared_by_their_outputs(
    scheme: str, random_experts: Policies, tmp_path: Path
):
    """Contract: experts of the trainer's masters agree, two that are exchanged and one that moved
    are named, each alone.
    """
    folder = random_experts(False)
    tensors = read(folder)
    engine = start_engine(make_model(folder, scheme), folder, tmp_path / "export")
    report = qarl.verify.weights(folder, engine._llm)
    block = "model.layers.1.mlp.experts"
    swapped = dict(tensors)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"{block}.{n}.{leaf}.weight" for n in (0, 2))
        swapped[one], swapped[other] = tensors[other], tensors[one]
    exchanged = qarl.verify.weights(swapped, engine._llm)
    name = f"{block}.3.up_proj.weight"
    torch.manual_seed(0)
    noise = torch.randn_like(tensors[name]) * 0.3 * tensors[name].std()
    moved = qarl.verify.weights(tensors | {name: tensors[name] + noise}, engine._llm)
    engine.close()
    assert report.agrees, report.lines()
    assert any(each.name == f"{block}.3" for each in report.layers)
    assert not any("experts" in text for text in report.unchecked)
    named = [(cause.name, cause.about) for cause in exchanged.faults]
    assert named == [("expert-order", (f"{block}.0", f"{block}.2"))]
    assert [(cause.name, cause.about) for cause in moved.faults] == [("stale", (f"{block}.3",))]


@pytest.mark.slow
def test_a_plain_vllm_server_is_compared_by_its_url(
    random_policy: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Contract: a vLLM server, of which nothing is QaRL's but the worker extension, holds the
    trainer's masters, and after vLLM's own reload of a checkpoint with another down_proj that layer
    is named. A server that needs a key and gets none is refused.
    """
    folder = random_policy(False)
    masters = read(folder)
    layer = "model.layers.1.mlp.down_proj"
    weight = masters[f"{layer}.weight"]
    moved = masters | {f"{layer}.weight": weight + 0.05 * weight.std() * weight.sign()}
    published = write(tmp_path / "published", folder, moved)
    target = tmp_path / "report.json"
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_API_KEY", "key")
    with server(folder, plain=True, log=tmp_path / "log", more=EXTENSION) as (url, process):
        wait(url, process)
        assert main(["verify", "weights", str(folder), url]) == 0
        monkeypatch.delenv("VLLM_API_KEY")
        assert main(["verify", "weights", str(folder), url]) == 2
        assert "put its key into VLLM_API_KEY" in " ".join(capsys.readouterr().err.split())
        monkeypatch.setenv("VLLM_API_KEY", "key")
        VllmServer(url).call("reload_weights", weights_path=str(published))
        assert main(["verify", "weights", str(folder), url, "--json", str(target)]) == 1
        assert qarl.verify.weights(moved, url).agrees
    report = json.loads(target.read_text())
    (cause,) = [cause for cause in report["causes"] if cause["level"] == "fault"]
    assert (cause["name"], cause["about"]) == ("stale", [layer])


@pytest.fixture
def answering() -> Iterator[tuple[str, dict[str, tuple[int, Any]]]]:
    """Yield the URL of a server that is no vLLM, and its answers by path: status and JSON."""
    answers: dict[str, tuple[int, Any]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, {}))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}", answers
    running.shutdown()
    thread.join()
    running.server_close()


MODELS = {"data": [{"id": "policy"}]}
NO_METHOD = {"error": {"message": "'CPUWorker' object has no attribute 'qarl_held_weights'"}}
HELD = {
    "config": {},
    "quantization": None,
    "stages": 2,
    "expert_parallel": False,
    "tensors": [],
    "others": {},
}
REFUSED = {
    "another server": ({}, "answers /v1/models with status 404"),
    "no model": ({"/v1/models": (200, {"data": []})}, "lists no model at /v1/models"),
    "no development mode": (
        {"/v1/models": (200, MODELS)},
        "cannot be read, and nothing was compared: it has no /collective_rpc: it was started"
        " without VLLM_SERVER_DEV_MODE=1",
    ),
    "no extension": (
        {"/v1/models": (200, MODELS), "/collective_rpc": (500, NO_METHOD)},
        "it was started without the worker extension. Start it with VLLM_SERVER_DEV_MODE=1 vllm"
        " serve … --worker-extension-cls qarl.verify.HeldWeights",
    ),
    "stages": (
        {"/v1/models": (200, MODELS), "/collective_rpc": (200, {"results": [HELD]})},
        "the engine runs with pipeline_parallel_size 2, by which each worker has some layers",
    ),
    "experts of other workers": (
        {
            "/v1/models": (200, MODELS),
            "/collective_rpc": (200, {"results": [HELD | {"stages": 1, "expert_parallel": True}]}),
        },
        "the engine runs with enable_expert_parallel",
    ),
}


@pytest.mark.parametrize(("answers", "said"), REFUSED.values(), ids=REFUSED)
def test_a_server_that_cannot_be_read_is_refused_with_its_remedy(
    answering: Any, random_policy: Policies, capsys, answers: Any, said: str
):
    url, by_path = answering
    by_path.update(answers)
    assert main(["verify", "weights", str(random_policy(False)), url]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_address_where_nothing_answers_is_refused(random_policy: Policies, capsys):
    assert main(["verify", "weights", str(random_policy(False)), "http://127.0.0.1:9"]) == 2
    assert "does not answer /v1/models" in " ".join(capsys.readouterr().err.split())
