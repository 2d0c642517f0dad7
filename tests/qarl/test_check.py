"""`qarl init` and `qarl check`: what is written is healthy, and what would spoil a run is named before it begins."""

import ast
from collections.abc import Callable
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
    assert "#" in (starter / "run.yaml").read_text() and ast.get_docstring(
        ast.parse((starter / "reward.py").read_text())
    )
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


SPOILT: dict[str, tuple[Callable[[dict], object], str]] = {
    "a reward that is the same for all": (
        lambda tree: Path("reward.py").write_text("def reward(problem, text):\n    return 1.0\n"),
        "warning: reward: gives the reference answer no more than a wrong one",
    ),
    "a checker that never is content": (
        lambda tree: tree["task"].update(correct="nothing.py:right"),
        "warning: accuracy: does not tell the reference answer from a wrong one",
    ),
    "answers longer than a completion may be": (
        lambda tree: tree["rollout"].update(max_new_tokens=1),
        "warning: reference answers: 2 to 3 tokens, ",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILT.values(), ids=SPOILT)
def test_what_would_spoil_a_run_is_a_warning(starter: Path, capsys, spoil: Callable[[dict], object], said: str):
    (starter / "nothing.py").write_text("def right(problem, text):\n    return False\n")
    tree = yaml.safe_load((starter / "run.yaml").read_text())
    tree["task"]["correct"] = "exact"
    spoil(tree)
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


@pytest.mark.parametrize("command", ["check", "mismatch"])
@pytest.mark.parametrize(("field", "value"), [("rollout.prompts", "few"), ("bitwise", "few")])
def test_a_fields_value_is_not_taken_for_the_configuration(
    command: str, field: str, value: str, capsys: pytest.CaptureFixture[str]
):
    """Argparse knows no fields, and would take what follows one for CONFIG where there is none."""
    assert main([command, f"--{field}", value]) == 2
    assert f"{field} " in (text := capsys.readouterr().err) and repr(value) in text
