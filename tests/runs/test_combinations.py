"""Random combinations of options train two steps, or are refused for a reason that is true.

Two in every run of the suite, sixty in `make test-thorough`. What runs is killed after its first step's
checkpoint and resumed in every third case. Blind spot: two steps show that parts fit together, not that they learn.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.combinations import draw, refusals
from tests.support.profiles import thorough
from tests.support.runs import Run, lines, qarl

FEW, MANY = (0, 7), range(60)
"""Seeds; the few are one that is killed, and LoRA."""
SIZES = ["--prompts", "4", "--samples", "4", "--eval.problems", "0", "--checkpoint-every", "1"]


def killed_and_resumed(arguments: list[str], run: Path) -> subprocess.CompletedProcess[str]:
    """SIGKILL once the first step's checkpoint is there (or soon after), then the run to its end."""
    begun = Run(*arguments)
    while begun.poll() is None and not (run / "checkpoints/step-000001/manifest.json").exists():
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(begun.pid, signal.SIGKILL)
    ended = begun.wait()
    return qarl("train", "--resume", str(run)) if ended.returncode == -signal.SIGKILL else ended


@pytest.mark.parametrize("seed", MANY if thorough() else FEW)
def test_a_combination_runs_or_says_why_not(seed: int, tmp_path: Path):
    combination, run = draw(seed), tmp_path / "run"
    arguments = ["train", *combination.arguments(), *SIZES, "--steps", "2", "--output", str(run)]
    reasons = refusals(combination)
    if not reasons and seed % 3 == 0 and combination.processes is None:
        done = killed_and_resumed(arguments, run)
    else:
        done = qarl(*arguments)
    if reasons:
        assert done.returncode == 2 and any(reason in done.stderr for reason in reasons), (
            f"{combination}\n{done.stderr}"
        )
        assert not run.exists()
        return
    assert done.returncode == 0, f"{combination}\n{done.stdout}{done.stderr}"
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert (run / "export").is_dir()
