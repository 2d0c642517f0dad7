"""Recorded completions as groups again, and which runs cannot be learned from a second time."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from qarl.cli.main import main
from qarl.configs.load import load_config
from qarl.embedded.tokenizer import train_tokenizer
from qarl.report.recorded_groups import read_groups
from qarl.report.run_folder import RunFolder
from qarl.report.token_files import step_files
from qarl.report.token_recorder import TokenRecorder
from qarl.rollout.types import Group
from qarl.run.replay import comparison
from tests.support.learners import make_groups


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["12 + 34 = 46"], 300, 64)


def single(group: Group) -> Group:
    """With log-probs as an engine has them, in fp32, and experts of a router."""
    experts = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    alike = [
        dataclasses.replace(c, logprobs=tuple(np.array(c.logprobs, np.float32).tolist()), experts=experts)
        for c in group.completions
    ]
    return dataclasses.replace(group, completions=tuple(alike))


@pytest.fixture
def recorded(tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of three steps, of which all completions of the first two are recorded, and one of the third."""
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(load_config(None, {"output": "run", "steps": "3", "record": "all"}))
    for step in (1, 2, 3):
        record = "all" if step < 3 else 1
        TokenRecorder(run.tokens, record, tokenizer, None, True).write(step, make_groups(step), None)
    return run


def test_groups_are_read_as_they_were_learned_from(tmp_path: Path, tokenizer):
    """Prompts, completions, log-probs to the bit, rewards, and the experts' dtype and shape."""
    groups = [single(group) for group in make_groups()]
    TokenRecorder(tmp_path, "all", tokenizer, None, True).write(1, groups, None)
    read = read_groups(step_files(tmp_path)[1])
    assert read == groups
    experts = read[1].completions[0].experts
    assert experts.dtype == np.int16 and (experts == groups[1].completions[0].experts).all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "has recorded 2 of the 24 completions of step 3, of 3 to learn from; give --steps 2, or take a run that"),
        ("--steps 4", "has recorded 2 of the 24 completions of step 3, of 4 to learn from"),
        ("--model tiny-qwen3-moe", "was sampled with model 'tiny-qwen3', and model 'tiny-qwen3-moe' would do nothing"),
        ("--prompts 8", "was sampled with rollout.prompts 32, and rollout.prompts (--prompts) 8 would do nothing"),
        ("--seed 4", "was sampled with seed 0, and seed 4 would do nothing"),
        ("--task gcd", "was sampled with task.name 'chain_sum', and task.name (--task) 'gcd' would do nothing"),
        ("--eval.problems 8", "eval.problems 8 needs an engine, and from_rollouts 'run' learns without one"),
        ("--init gptq --scale kept", "quantization.init 'gptq' needs an engine"),
        ("--config tiny-qwen3", "--from-rollouts has the recorded run's configuration; --config tiny-qwen3 does not"),
    ],
)
def test_what_cannot_be_replayed(recorded: RunFolder, capsys: pytest.CaptureFixture[str], arguments: str, said: str):
    assert main(["train", "--from-rollouts", "run", *arguments.split()]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["run"]


def test_missing_and_damaged_steps(recorded: RunFolder, capsys: pytest.CaptureFixture[str]):
    file = step_files(recorded.tokens)[2]
    file.write_bytes(file.read_bytes()[:-9])
    assert main(["train", "--from-rollouts", "run"]) == 2
    assert "step-000002.parquet' is damaged" in capsys.readouterr().err
    shutil.rmtree(recorded.tokens)
    assert main(["train", "--from-rollouts", "run"]) == 2
    said = "has recorded no completions of step 1, of 3 to learn from; take a run that was started with --record all"
    assert said in capsys.readouterr().err
    assert main(["train", "--from-rollouts", "nowhere"]) == 2
    assert "there is no folder 'nowhere'" in capsys.readouterr().err


def test_the_first_difference_is_named():
    """Of the learner's figures; times and what was sampled besides are not its."""
    before = [{"step": 1, "learn/loss": 0.5, "digest": "a", "reward": 1}, {"step": 2, "learn/loss": 0.5, "digest": "b"}]
    after = [{**before[0], "reward": 2}, {**before[1], "digest": "c"}]
    assert comparison(Path("run"), before, after) == "first apart from run in step 2: digest c, was b"
    assert comparison(Path("run"), before, after[:1]).startswith("equal to run to the last bit, in all 1 steps")
