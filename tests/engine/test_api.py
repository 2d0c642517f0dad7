"""The Python API with vLLM: a loop of one's own beside `qarl train`, the documentation's examples, and what is refused
while an engine runs."""

import re
import runpy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qarl
from qarl.configs.errors import ConfigError
from qarl.rollout.engine import EngineError
from tests.support.imports import import_libraries
from tests.support.rewards import reward
from tests.support.runs import lines, succeeded

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_loop_of_ones_own_is_the_trainers(random_policy: Callable[[bool], Path], tmp_path: Path):
    """Contract: three steps of examples/own_loop.py publish the very tensors that `qarl train` publishes with the same
    settings, reward and prompts. Blind to a decaying learning rate, which the loop has not."""
    import_libraries()
    own = runpy.run_path(str(ROOT / "examples/own_loop.py"))
    own["train"].__globals__["reward"] = lambda problem, answer: reward(problem, answer.text)
    published = [digest for _, digest in own["train"](3, model=str(random_policy(True)), prompts=8)]
    options = [
        "--prompts",
        "8",
        "--steps",
        "3",
        "--learner.optimizer.decay_steps",
        "0",
        "--eval.problems",
        "0",
        "--export",
        "false",
    ]
    source = ["--config", "tiny-qwen3", "--model", random_policy(True), "--reward", "tests.support.rewards:reward"]
    succeeded("train", *source, *options, "--output", tmp_path / "run")
    assert published == [line["digest"] for line in lines(tmp_path / "run")] and len(set(published)) == 3


@pytest.mark.slow
def test_the_documentations_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import_libraries()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/reference/api.md").read_text(), re.DOTALL):
        exec(block, names)


@pytest.mark.slow
def test_what_is_refused_while_an_engine_runs(random_policy: Callable[[bool], Path]):
    import_libraries()
    policy, other = (qarl.align(random_policy(tied), "w4a16") for tied in (True, False))
    with pytest.raises(ConfigError, match=r"rollout\.max_num_sequences"):
        qarl.engine(policy, max_num_sequences=3)
    with qarl.engine(policy, max_prompt_tokens=8, max_new_tokens=8, max_num_seqs=8) as engine:
        assert engine.multiplies == "the engine's own layers" and engine.published.canary is not None
        prompt = engine.prompt([5, 6, 7])
        (answer,), (greedy,) = engine.generate([prompt, prompt], seed=1)
        assert answer != greedy and engine.generate([[5, 6, 7]], seed=1) == [[answer]]
        with pytest.raises(EngineError, match="one engine a process"):
            qarl.engine(other)
        batch = qarl.make_batch([qarl.Group(prompt, (answer, greedy), (0.0, 1.0))])
        skewed = qarl.Completion(answer.token_ids, tuple(p - 1 for p in answer.logprobs), "", 0, "stop")
        with pytest.raises(qarl.QarlError, match="step-0 gate"):
            policy.batch_logprobs(qarl.make_batch([qarl.Group(prompt, (skewed, skewed), (0.0, 1.0))]))
        policy.batch_logprobs(batch).sum().backward()
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
        entered, leave, generate = threading.Event(), threading.Event(), engine._engine.generate

        engine._engine.generate = lambda *call: (entered.set(), leave.wait(60), generate(*call))[2]  # type: ignore
        thread = threading.Thread(target=engine.generate, args=([prompt],))
        thread.start()
        entered.wait(60)
        with pytest.raises(qarl.PolicyError, match="refresh: generate is under way in 1 thread"):
            policy.refresh()
        leave.set()
        thread.join()
        policy.refresh()
        foreign = type(engine.prompter.tokenizer).from_pretrained(policy.folder, eos_token="0")
        for fault, refused in (
            ("call policy.publish", lambda: engine.generate([prompt])),
            ("opened for the policy", lambda: other.publish(engine)),
            ("its end token", lambda: policy.check(tokenizer=foreign)),
            ("has 9 tokens; allowed are 1 to", lambda: engine.generate([[5] * 9])),
        ):  # fmt: skip
            with pytest.raises(qarl.PolicyError, match=fault):
                refused()
        assert policy.publish(engine).version == 1
        assert engine.generate([prompt], greedy=True)[0][0].weight_version == 1
    assert policy.engine is None and other(torch.tensor([[5, 6]])).logits.shape[:2] == (1, 2)
