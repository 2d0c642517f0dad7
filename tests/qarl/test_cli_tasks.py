"""`qarl tasks`: every built-in task on a line, and one task with its options and an example that scores as right."""

import subprocess
import sys

import pytest

from qarl.cli.main import main
from qarl.tasks.procedural import reasoning_gym_datasets


@pytest.mark.parametrize("columns", [80, 200])
def test_every_task_has_a_name_and_a_line(columns: int, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    named = [line.split()[0] for line in lines if line.startswith("  ")]
    assert named == sorted(reasoning_gym_datasets())


def test_one_task_shows_options_defaults_and_an_example(capsys):
    assert main(["tasks", "countdown"]) == 0
    text = capsys.readouterr().out
    for part in ("min_numbers [4]  Minimum numbers to provide", "question:\n", "answer:\n", "--task countdown"):
        assert part in text
    assert "seed [" not in text, "options that are QaRL's to choose"


def test_a_task_that_needs_options_says_so(capsys):
    assert main(["tasks", "composite"]) == 0
    assert "no example without options" in capsys.readouterr().out
    assert main(["tasks", "math"]) == 0
    assert "the paper's data, or --task.data" in capsys.readouterr().out


def test_light_commands_load_nothing_heavy():
    """Reports and tasks neither torch nor what brings it; a task's own library only where a task is shown."""
    code = (
        "import sys, qarl.page.build, qarl.tasks; from qarl.cli.main import main\n"
        "heavy = {'torch', 'vllm', 'transformers'}\n"
        "assert not {*heavy, 'reasoning_gym'} & {*sys.modules}\n"
        "assert main(['tasks', 'lcm']) == 0 and not heavy & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
