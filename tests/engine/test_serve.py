"""`qarl serve` and vLLM's own server over HTTP: greedy completions equal the engine's, plain chats
are answered as `qarl eval` was, and a kill ends all processes.
"""

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from qarl.api.runs import evaluated
from qarl.configs.load import config_file, load_config
from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.kernels import vllm_cpu
from qarl.rollout.servers.vllm.start import free_ports
from qarl.rollout.types import Prompt, Sampling
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.options import VllmOptions
from qarl.run.evaluation_plan import plan_evaluation
from qarl.run.export_note import export_note
from qarl.run.prompts import open_prompter
from qarl.run.request_defaults import all_problems, request_defaults
from qarl.sync.export import export_checkpoint
from qarl.tasks import load_task
from tests.support import Policies
from tests.support.engines import SEQUENCES, disturb, make_model
from tests.support.profiles import thorough
from tests.support.serving import request, server, wait

_NEW_TOKENS = 12
_QUESTIONS = 6
_SAMPLING = {"eos_token_id": 2, "repetition_penalty": 1.5, "temperature": 0.2, "top_k": 2}
"""Generation config of a base, which no rollout and no evaluation applies."""


@pytest.fixture
def measured(random_policy: Policies, tmp_path: Path) -> Path:
    """Return an export that was asked behind a system prompt, with an argument of its template."""
    base = Path(shutil.copytree(random_policy(True), tmp_path / "base"))
    (base / "generation_config.json").write_text(json.dumps(_SAMPLING))
    template = open_prompter(
        base,
        load_config(None, {}).rollout,
        load_config(None, {}).task,
    )
    text = "{{ '0 = 0\\n' if enable_thinking is defined and enable_thinking is false }}"
    (base / "chat_template.jinja").write_text(template.tokenizer.chat_template + text)
    fields = {"model": str(base), "task.system": "Be brief.", "eval.problems": str(_QUESTIONS)}
    fields["task.template.enable_thinking"] = "false"
    config = load_config(config_file("tiny-qwen3"), fields)
    prompter = open_prompter(base, config.rollout, config.task)
    defaults = request_defaults(config, prompter.tokenizer, all_problems(load_task(config.task)))
    export = tmp_path / "an export"
    note = export_note(tmp_path / "run", config, 1, export, base)
    model = make_model(base, "w4a16")
    disturb(model, 1)  # a draw that does not end every answer at once
    export_checkpoint(model, base, export, note, defaults)
    return export


def test_an_export_is_served_as_it_was_evaluated(measured: Path):
    """Contract: a client that knows the question alone gets the evaluated answer, of `qarl serve`
    without naming a temperature, and of `vllm serve FOLDER` at temperature 0. What the base's
    generation config says, or another system prompt, gives other answers. `qarl serve` completes
    tokens as an engine of this process does, and a kill of it leaves no process.

    Blind spot: one request at a time; a batch of the server's own making may round otherwise.
    """
    plan = plan_evaluation(str(measured), {})
    assert plan.evaluation.problems == _QUESTIONS
    (result,) = evaluated(plan, 0).results
    expected = [question.answers[0] for question in result.questions]
    assert all(expected), "empty answers would equal any others"

    def answers(url: str, **fields: Any) -> list[str]:
        found = []
        for question in result.questions:
            messages = [*fields.get("before", []), {"role": "user", "content": question.question}]
            body = {"model": "an export", **fields, "messages": messages}
            body.pop("before", None)
            (choice,) = request(f"{url}/v1/chat/completions", body)["choices"]
            found.append((choice["message"]["content"] or "").strip())
        return found

    completed = completions(measured)
    with server(measured) as (url, process):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("starting vLLM")
        assert f"{url}/v1, model 'an export'" in process.stdout.readline(), "that it is ready"
        assert [model["id"] for model in request(f"{url}/v1/models")["data"]] == ["an export"]
        assert answers(url) == expected
        for sequence, tokens in zip(SEQUENCES, completed, strict=True):
            body = {"model": "an export", "prompt": sequence, "max_tokens": _NEW_TOKENS}
            body |= {"temperature": 0, "return_token_ids": True}
            (choice,) = request(f"{url}/v1/completions", body)["choices"]
            assert choice["token_ids"] == tokens
        process.kill()
        process.wait()
        assert _ends(process.pid), "a process of the server is left"
    with server(measured, plain=True) as (url, process):
        wait(url, process)
        assert answers(url, temperature=0) == expected
        assert answers(url, temperature=0, repetition_penalty=1.5) != expected
        other = [{"role": "system", "content": "Be long."}]
        assert answers(url, temperature=0, before=other) != expected
        arguments = {"enable_thinking": True}
        assert answers(url, temperature=0, chat_template_kwargs=arguments) != expected


def completions(export: Path) -> list[list[int]]:
    """Return the greedy completions of `SEQUENCES` by an engine of this process."""
    rollout = RolloutConfig(max_prompt_tokens=48, max_new_tokens=_NEW_TOKENS, max_num_seqs=4)
    engine = VllmEngine(export, VllmOptions(rollout))
    sampling = Sampling(samples=1, max_new_tokens=_NEW_TOKENS, temperature=0.0)
    answers = [engine.generate([Prompt("p", "", tuple(s))], sampling)[0][0] for s in SEQUENCES]
    engine.close()
    return [list(answer.token_ids) for answer in answers]


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


@pytest.mark.skipif(not thorough(), reason="starts a server of its own: make test-thorough")
def test_the_example_asks(measured: Path):
    """Check that examples/serve_export.sh serves, gets an answer, and leaves nothing running."""
    script = Path(__file__).parents[2] / "examples/serve_export.sh"
    port = free_ports(1)[0]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(script), str(measured), str(port)],
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
