"""What examples/ holds runs: its scripts' commands are accepted by the real command, its reward is a reward.

No run is started here; `tests/learner/test_own_objective.py` computes the example objective's loss and gradient."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from qarl.cli.main import main
from qarl.tasks import checked_score, load_task

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = EXAMPLES / "own_task"


def commands(script: str, *arguments: str | Path, folder: Path) -> list[list[str]]:
    """Run a script with a `qarl` that only writes down what it was called with; its arguments, call by call."""
    calls = folder / "calls"
    stub = folder / "qarl"
    stub.write_text(f"#!/usr/bin/env bash\nprintf '%q ' \"$@\" >> {shlex.quote(str(calls))}\necho >> {calls}\n")
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run([str(EXAMPLES / script), *map(str, arguments)], env=env, check=True, timeout=60)
    return [shlex.split(call) for call in calls.read_text().splitlines()]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `qarl train ARGUMENTS --dry-run` complains of; "" where it accepts them."""
    status = main([*arguments, "--dry-run"])
    return capsys.readouterr().err if status else ""


def test_own_tasks_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "a run"
    train, evaluate = commands("own_task/run.sh", run, "--seed", "3", folder=tmp_path)
    assert train[0] == "train" and train[-2:] == ["--seed", "3"] and refused(train, capsys) == ""
    assert evaluate[:2] == ["eval", str(run)]


def test_own_tasks_reward():
    task = load_task(str(TASK / "questions.jsonl"), {}, f"{TASK / 'reward.py'}:reward")
    for split in ("train", "heldout"):
        for problem in task.problems(split, 0, 8, 0):
            near, far = int(problem.answer) + problem.metadata["tolerance"], int(problem.answer) + 3
            texts = (problem.answer, f" {near} ", str(far), "many")
            assert [checked_score(task, problem, text) for text in texts] == [1.0, 0.5, 0.0, 0.0]


def test_compare_schemes_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    calls = commands("compare_schemes.sh", tmp_path / "runs", "w4a16 w8a8", "--steps", "2", folder=tmp_path)
    assert [call[0] for call in calls] == ["train", "train", "eval", "eval"]
    assert [refused(call, capsys) for call in calls[:2]] == ["", ""]
    assert calls[1][1:5] == ["--scheme", "w8a8", "--output", str(tmp_path / "runs/w8a8")]
