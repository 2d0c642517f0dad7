"""QaRL in a folder whose own packages are called as its rooms are."""

import subprocess
import sys
from pathlib import Path

import pytest

DECOYS = ("configs", "quant", "learner", "rollout", "sync", "tests")


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder with a package of each room's name, which cannot be imported."""
    for name in DECOYS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the decoy {name}')\n")
    return tmp_path


def test_every_module_is_imported_beside_packages_of_the_rooms_names(decoys: Path):
    """Of the light ones, and of those that every command needs; scripts/check_wheel.sh trains in such a folder."""
    code = "import qarl.cli.main, qarl.loop, qarl.rollout.vllm.options, qarl.rollout.servers.open, qarl.sync.export"
    subprocess.run([sys.executable, "-c", code], cwd=decoys, check=True)


def test_a_reward_may_be_called_quant(decoys: Path):
    """`python -m qarl` has the working folder first on its path, and the reward is imported from its file."""
    (decoys / "quant.py").write_text("raise ImportError('the reward was imported')\n")
    (decoys / "questions.jsonl").write_text('{"question": "1 + 1 =", "answer": "2", "split": "train"}\n')
    options = ["--task", "questions.jsonl", "--reward", "quant.py:reward", "--eval.problems", "0"]
    command = [sys.executable, "-m", "qarl", "check", *options]
    done = subprocess.run(command, cwd=decoys, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the reward was imported" in done.stderr
