"""The Python API: names, a user's own loop, the documentation's examples, and refusals.

The loop is compared with `qarl train`; refusals are of calls while an engine runs. A policy without
an engine is tested in tests/qarl/test_policy.py.
"""

import dataclasses
import inspect
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qarl
from tests.support.expected import assert_expected
from tests.support.imports import import_libraries
from tests.support.rewards import reward
from tests.support.runs import lines, succeeded

ROOT = Path(__file__).parents[2]


def signature_lines(name: str, member: Any) -> list[str]:
    """Return `name` with one indented line a parameter, and one for what is returned."""
    signature = inspect.signature(member)
    lines = [name, *(f"    {parameter}" for parameter in signature.parameters.values())]
    if signature.return_annotation is not inspect.Signature.empty:
        lines.append(f"    -> {inspect.formatannotation(signature.return_annotation)}")
    return lines


def signatures() -> list[str]:
    """Return the signatures of public names, and of public methods of the API's own classes."""
    members = {name: getattr(qarl, name) for name in qarl.__all__}
    assert all(map(inspect.getdoc, members.values()))
    members |= {
        "losses": qarl.losses.Loss.__call__,
        "losses.of_tokens": qarl.losses.Loss.of_tokens,
    }
    for owner in (qarl.Policy, qarl.Engine):
        members |= {
            f"{owner.__name__}.{name}": member
            for name, member in vars(owner).items()
            if name[0] != "_"
        }
    own: dict[str, Any] = {
        n: m for n, m in members.items() if inspect.isfunction(m) or dataclasses.is_dataclass(m)
    }
    lines = [line for name, member in own.items() for line in signature_lines(name, member)]
    # a class's own name says enough without its module
    return [re.sub(r"\b([a-z_]+\.)+(?=[A-Z])", "", line) for line in lines]


def test_names_and_signatures_are_those_recorded():
    """Compare the signatures with the record, because a change breaks people's code.

    If it is intended, record it (tests/support/expected.py) and add a line to CHANGELOG.md.
    """
    assert_expected(__file__, "signatures", signatures())
    page = (ROOT / "docs/reference/api.md").read_text()
    assert not [name for name in qarl.__all__ if not re.search(rf"`{name}\b", page)]


def test_the_import_is_light():
    code = (
        "import sys, time, qarl; print(time.process_time(), *{'torch', 'vllm', 'pydantic'} &"
        " {*sys.modules})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert float(run.stdout) <= 0.2  # seconds of CPU; any name after it is no number


@pytest.mark.slow
def test_a_loop_of_ones_own_is_the_trainers(random_policy: Callable[[bool], Path], tmp_path: Path):
    """Check that three steps of examples/own_loop.py publish the very tensors of `qarl train`.

    Settings, reward and prompts are the same. Blind spot: a decaying learning rate, which the loop
    does not have.
    """
    import_libraries()
    train = runpy.run_path(str(ROOT / "examples/own_loop.py"))["train"]
    train.__globals__["reward"] = lambda problem, answer: reward(problem, answer.text)
    published = [digest for _, digest in train(3, model=str(random_policy(True)), prompts=8)]
    options = [
        "--prompts",
        "8",
        "--steps",
        "3",
        "--eval.problems",
        "0",
        "--export",
        "false",
    ]
    source = [
        "--config",
        "tiny-qwen3",
        "--model",
        random_policy(True),
        "--reward",
        "tests.support.rewards:reward",
    ]
    succeeded(
        "train",
        *source,
        *options,
        "--output",
        tmp_path / "run",
        "--learner.optimizer.decay_steps",
        "0",
    )
    assert published == [line["digest"] for line in lines(tmp_path / "run")]
    assert len(set(published)) == 3


@pytest.mark.slow
def test_the_documentations_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import_libraries()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/reference/api.md").read_text(), re.DOTALL
    ):
        exec(block, names)


@pytest.mark.slow
def test_what_is_refused_while_an_engine_runs(
    random_policy: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
):
    import_libraries()
    policy, other = (qarl.align(random_policy(tied), "w4a16") for tied in (True, False))
    with qarl.engine(policy, max_prompt_tokens=8, max_new_tokens=8, max_num_seqs=8) as engine:
        assert engine.multiplies == "the engine's own layers"
        assert engine.published.canary is not None
        prompt = engine.prompt([5, 6, 7])
        (answer,), (greedy,) = engine.generate([prompt, prompt], seed=1)
        assert answer != greedy
        assert engine.generate([[5, 6, 7]], seed=1) == [[answer]]
        batch = qarl.make_batch([qarl.Group(prompt, (answer, greedy), (0.0, 1.0))])
        skewed = qarl.Completion(
            answer.token_ids, tuple(p - 1 for p in answer.logprobs), "", 0, "stop"
        )
        with pytest.raises(qarl.QarlError, match="step-0 gate"):
            policy.batch_logprobs(
                qarl.make_batch([qarl.Group(prompt, (skewed, skewed), (0.0, 1.0))])
            )
        policy.batch_logprobs(batch).sum().backward()
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
        inner = engine._connection.engine
        entered = threading.Event()
        leave = threading.Event()
        monkeypatch.setattr(
            inner,
            "generate",
            lambda *_: (entered.set(), leave.wait(60), [])[2],
        )
        thread = threading.Thread(target=engine.generate, args=([prompt],))
        thread.start()
        entered.wait(60)
        with pytest.raises(qarl.PolicyError, match="refresh: generate is under way in 1 thread"):
            policy.refresh()
        leave.set()
        thread.join()
        monkeypatch.undo()
        policy.refresh()
        foreign = type(engine.prompter.tokenizer).from_pretrained(policy.folder, eos_token="0")
        for fault, refused in (
            ("call policy.publish", lambda: engine.generate([prompt])),
            ("opened for the policy", lambda: other.publish(engine)),
            ("its EOS token", lambda: policy.check(tokenizer=foreign)),
            ("has 9 tokens; allowed are 1 to", lambda: engine.generate([[5] * 9])),
        ):
            with pytest.raises(qarl.PolicyError, match=fault):
                refused()
        assert policy.publish(engine).version == 1
        assert engine.generate([prompt], greedy=True)[0][0].weight_version == 1
    assert other(torch.tensor([[5, 6]])).logits.shape[:2] == (1, 2)
