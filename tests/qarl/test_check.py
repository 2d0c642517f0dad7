"""`qarl init` and `qarl check`: what is written is healthy, and what would spoil a run is named before it begins."""

import ast
from pathlib import Path

import pytest
import yaml

from qarl.cli.main import main
from qarl.configs.load import load_config
from qarl.starter import FILES
from qarl.tasks import load_task


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random_policy) -> Path:
    """The folder that `qarl init` writes, as the working folder, on a policy that need not be warmed up."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    file = tmp_path / "mine" / "run.yaml"
    file.write_text(file.read_text().replace("model: tiny-qwen3", f"model: {random_policy(True)}"))
    return tmp_path / "mine"


def test_init_writes_what_is_healthy(starter: Path, capsys: pytest.CaptureFixture[str]):
    """Contract: every file is commented, the questions are split, and check has nothing to say against them."""
    assert sorted(path.name for path in starter.iterdir()) == sorted(FILES)
    assert "#" in (starter / "run.yaml").read_text()
    assert ast.get_docstring(ast.parse((starter / "reward.py").read_text()))
    capsys.readouterr()
    assert main(["check", "run.yaml"]) == 0
    text = capsys.readouterr().out
    for part in (
        "kernels: w4a16 in bfloat16: ",
        "task: questions.jsonl: 2560 rows; 2304 to train on, 256 held out",
        "as the model sees it (",
        "  | <|im_start|>user\n  | State the final answer",
        "reference answer: ",
        "reward 1, counts as right",
        "a wrong answer: ",
        "that in a box: ",
        "reward 0, counts as wrong",
        "64 allowed",
        "memory: ",
        " free at ",
        "all well",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("reward", "warning: reward: gives the reference answer no more than a wrong one"),
        ("correct", "warning: accuracy: does not tell the reference answer from a wrong one"),
    ],
)
def test_a_judge_that_tells_nothing_is_a_warning(starter: Path, capsys, field: str, said: str):
    """What else would spoil a run: tests/qarl/test_planted_faults.py."""
    (starter / "same.py").write_text("def same(problem, text):\n    return 0\n")
    tree = yaml.safe_load((starter / "run.yaml").read_text())
    tree["task"] |= {"correct": "exact", field: "same.py:same"}
    (starter / "run.yaml").write_text(yaml.safe_dump(tree))
    assert main(["check", "run.yaml"]) == 1
    text = capsys.readouterr().out
    assert said in text and text.endswith("1 warning\n"), text


def test_the_starters_reward_is_what_it_says(starter: Path):
    from qarl.tasks import Response

    task = load_task(load_config(starter / "run.yaml", {}).task)
    (problem,) = task.problems("heldout", 0, 1, 0)
    near = str(int(problem.answer) + 1)
    responses = [Response(problem, text) for text in (problem.answer, near, "many")]
    assert task.rewards(responses) == [1.0, 0.5, 0.0] and task.correct(responses) == [True, False, False]
