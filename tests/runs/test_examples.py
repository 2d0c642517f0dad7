"""Every example in examples/ runs, at the smallest size.

Scripts are run with a `qarl` that writes down what it is called with; those commands then run for
real, one after another. `tests/learner/test_objectives.py` computes the example objective's loss
and gradient.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from qarl.configs.schema.task import TaskConfig
from qarl.tasks import Response, load_task
from tests.support.cases import cases
from tests.support.runs import lines, succeeded

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = EXAMPLES / "own_task"


def commands(
    script: str,
    *arguments: str | Path,
    folder: Path,
) -> list[list[str]]:
    """The arguments of each `qarl` that a script calls, in order."""
    calls = folder / "calls"
    stub = folder / "qarl"
    stub.write_text(
        f"#!/usr/bin/env bash\nprintf '%q ' \"$@\" >> {shlex.quote(str(calls))}\necho >> {calls}\n"
    )
    stub.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(
        [str(EXAMPLES / script), *map(str, arguments)],
        env=env,
        check=True,
        timeout=60,
    )
    return [shlex.split(call) for call in calls.read_text().splitlines()]


def test_own_task_with_an_objective_of_ones_own(tmp_path: Path):
    folder = tmp_path / "a run"
    own = f"{EXAMPLES}/own_objective.py:objective"
    options = [
        "--steps",
        "2",
        "--samples",
        "4",
        "--objective",
        "own",
        "--learner.objective.function",
        own,
    ]
    calls = commands("own_task/run.sh", folder, *options, folder=tmp_path)
    assert [call[0] for call in calls] == ["train", "eval"]
    assert "held-out" in [succeeded(*call).stdout for call in calls][1]
    assert [line["step"] for line in lines(folder)] == [1, 2]


def test_own_tasks_reward():
    task = load_task(
        TaskConfig(name=str(TASK / "questions.jsonl"), reward=f"{TASK / 'reward.py'}:reward")
    )
    for split in ("train", "heldout"):
        for problem in task.problems(split, 0, 8, 0):
            near = int(problem.answer) + problem.metadata["tolerance"]
            far = int(problem.answer) + 3
            texts = (problem.answer, f" {near} ", str(far), "many")
            assert task.rewards([Response(problem, text) for text in texts]) == [
                1.0,
                0.5,
                0.0,
                0.0,
            ]


@pytest.mark.parametrize(("fields", "texts", "expected"), cases(__file__, "rewards"))
def test_rewards_in_every_signature(fields, texts, expected, monkeypatch):
    """examples/tasks, each as its commands name it; two tokens a completion."""
    monkeypatch.chdir(EXAMPLES / "tasks")
    task = load_task(TaskConfig(**{"name": "questions.csv", **fields}))
    for split in ("train", "heldout"):
        (problem,) = task.problems(split, 0, 1, 0)
        responses = [
            Response(problem, text.replace("ANSWER", problem.answer), (1, 2)) for text in texts
        ]
        assert task.rewards(responses) == pytest.approx(expected)
