"""`qarl eval --perfectible`: which questions are kept, and what a report says of a run on them."""

import json
from pathlib import Path

import pytest

from qarl.cli.main import main
from qarl.configs.load import load_config
from qarl.page.runs import RecordedRun, configurations
from qarl.page.verdict import verdict
from qarl.tasks import load_task
from tests.support import Policies
from tests.support.transformers_engine import use_transformers_engine

ODD = "def odd(problem, text):\n    return len(text) % 2 == 1 and not problem.question.startswith('never')\n"


def test_questions_solved_now_and_then_are_kept(
    random_policy: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The whole command, with an engine that only tests know and a policy that answers at random: shares of right
    answers are within the bounds, other columns and chats stay, and the file is one that qarl reads. A file that is
    there is not written over."""
    monkeypatch.chdir(tmp_path)
    use_transformers_engine(monkeypatch)
    rows = [{"question": f"{'never ' * (k < 3)}{k} =", "answer": str(k), "n": k, "split": "train"} for k in range(8)]
    rows.append({"question": "held out", "answer": "1", "split": "heldout"})
    Path("q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.py").write_text(ODD)
    options = "--perfectible perfectible.jsonl --task q.jsonl --task.correct r.py:odd --samples 6 --max-new-tokens 3"
    options += " --low 0.1 --high 0.9 --task.system Brief."
    asked = ["eval", str(random_policy(True)), *options.split()]
    assert main(asked) == 0
    lines = [json.loads(line) for line in Path("perfectible.jsonl").read_text().splitlines()]
    out = capsys.readouterr().out
    assert f"wrote perfectible.jsonl: {len(lines)} of 8 questions, of which 10% to 90% of the answers were right" in out
    assert lines and all(0.1 <= line["solved"] <= 0.9 and line["n"] >= 3 for line in lines)
    task = load_task(load_config(None, {"task.name": "perfectible.jsonl"}).task)
    (problem,) = task.problems("train", 0, 1, 0)
    assert problem.messages[0] == {"role": "system", "content": "Brief."} and task.size("heldout") == 0
    assert main(asked) == 2
    assert "'perfectible.jsonl' exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "reward", "level", "said"),
    [
        ({"task.name": "a/perfectible.jsonl"}, 0.97, "good", "Training accuracy is 97.0% at the end"),
        ({"task.name": "a/perfectible.jsonl"}, 0.5, "warning", "below 95 % there are too few steps, or something"),
        ({"task.name": "a/perfectible.jsonl", "task.reward": "m.py:f"}, 0.5, "", ""),
        ({"task.name": "q.jsonl"}, 0.5, "", ""),
    ],
)
def test_a_report_says_what_a_run_on_them_came_to(task: dict[str, str], reward: float, level: str, said: str):
    metrics = [{"step": s, "weight_version": s, "reward": reward, "skipped_batches": 0} for s in range(1, 11)]
    run = RecordedRun("run", load_config(None, {**task, "steps": "10"}), metrics, None, {}, {}, None)
    found = [finding for finding in verdict(configurations([run])) if "Training accuracy" in finding.text]
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all(said in finding.text for finding in found)
