"""Random combinations of options train two steps, or are refused for a reason that is true.

Two in every run of the suite, sixty in `make test-thorough`. What runs is killed after its first
step's checkpoint and resumed in every third case. `draw` may draw anything; `refusals` says, from
the options alone, whether and why the command must refuse them. Blind spot: two steps show that
parts fit together, not that they learn.
"""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from qarl.learner.objectives import OBJECTIVES
from tests.support.cases import cases
from tests.support.kernels import AVX512, CPU_SCHEMES
from tests.support.profiles import thorough
from tests.support.runs import Run, lines, qarl, qarl_alone

FIRST, LAST = (cases(__file__, name) for name in ("first", "last"))
"""The option → its values, and how often it has one; drawn before and after the objective."""


@dataclass(frozen=True)
class Combination:
    """options: dotted name → value as on the command line. processes: None leaves the launcher
    out.
    """

    options: dict[str, str] = field(default_factory=dict)
    processes: int | None = None

    def arguments(self) -> list[str]:
        """After `qarl train`."""
        flags = [part for name, value in self.options.items() for part in (f"--{name}", value)]
        return [
            *flags,
            *(["--processes", str(self.processes)] if self.processes else []),
        ]

    def __str__(self) -> str:
        return " ".join(self.arguments())


def draw(seed: int) -> Combination:
    """The combination of a seed; every option is left at its default about half of the time."""
    rng = random.Random(seed)

    def draw_some(of: dict[str, Any]) -> None:
        for name, (values, often) in of.items():
            if rng.random() < often:
                options[name] = rng.choice(values)

    options = {"scheme": rng.choice(CPU_SCHEMES)}
    draw_some(FIRST)
    if options.get("learner.master_dtype") and rng.random() < 0.5:
        options["learner.optimizer.rounding"] = rng.choice(["nearest", "stochastic"])
    draw_some({"learner.objective.name": ([*OBJECTIVES], 0.6)})
    options["learner.mini_batches"] = (
        "1" if options.get("learner.objective.name") == "on_policy" else "2"
    )
    draw_some(LAST)
    processes = 2 if rng.random() < 0.2 else None
    return Combination(options, processes)


def refusals(combination: Combination) -> list[str]:
    """Parts of the messages with which the command may refuse it, each a reason that is true; empty
    where it runs.
    """
    o = combination.options
    reasons = []
    if o.get("learner.lora.name") == "lora" and "learner.optimizer.rounding" in o:
        reasons.append("LoRA steps fp32 adapters")
    schemes = {o["scheme"], *(["w4a16"] if "=w4a16" in o.get("layers", "") else [])}
    if AVX512 and o.get("dtype") == "float32" and any(s.startswith("w4a16") for s in schemes):
        reasons.append("cannot run in the engine on this machine")
    if (
        "down_proj=w8a8" in o.get("layers", "")
        and o.get("model") == "tiny-qwen3-moe"
        and o["scheme"] != "w8a8"
    ):
        # an expert's three matrices are one module of the engine's
        reasons.append("as one, so its")
    return reasons


def stopped_by_other_experts(combination: Combination, said: str) -> bool:
    """Return whether canary or gate stopped a run, as they may with some 50 tokens: where a
    mixture is multiplied by other kernels than the engine's, one token that goes to another
    expert is enough.
    """
    o = combination.options
    checks = ("step-0 gate: k3-KL", "the canary's mean")
    mixture = o.get("model") == "tiny-qwen3-moe" and o.get("learner.kernel") == "reference"
    return mixture and any(check in said for check in checks)


def test_the_command_itself_is_what_a_fork_runs(tmp_path: Path):
    """Exit status and words of the real command, on which the other tests' forks rest."""
    arguments = ("train", "--scheme", "w4a17", "--output", tmp_path / "run")
    alone = qarl_alone(*arguments)
    forked = qarl(*arguments)
    assert alone.returncode == forked.returncode == 2
    assert "Traceback" not in alone.stderr
    assert (alone.stdout, alone.stderr) == (forked.stdout, forked.stderr)


FEW = (0, 7)
MANY = range(60)
"""Seeds; the few are one that is killed, and LoRA."""
SIZES = [
    "--prompts",
    "4",
    "--samples",
    "4",
    "--eval.problems",
    "0",
    "--checkpoint-every",
    "1",
]


def killed_and_resumed(arguments: list[str], run: Path) -> subprocess.CompletedProcess[str]:
    """SIGKILL once the first step's checkpoint is there (or soon after), then the run to its
    end.
    """
    begun = Run(*arguments)
    while begun.poll() is None and not (run / "checkpoints/step-000001/manifest.json").exists():
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(begun.pid, signal.SIGKILL)
    ended = begun.wait()
    return qarl("train", "--resume", str(run)) if ended.returncode == -signal.SIGKILL else ended


@pytest.mark.parametrize("seed", MANY if thorough() else FEW)
def test_a_combination_runs_or_says_why_not(seed: int, tmp_path: Path):
    combination = draw(seed)
    run = tmp_path / "run"
    arguments = [
        "train",
        *combination.arguments(),
        *SIZES,
        "--steps",
        "2",
        "--output",
        str(run),
    ]
    reasons = refusals(combination)
    if not reasons and seed % 3 == 0 and combination.processes is None:
        done = killed_and_resumed(arguments, run)
    else:
        done = qarl(*arguments)
    said = f"{combination}\n{done.stdout}{done.stderr}"
    if reasons:
        assert done.returncode == 2 and any(reason in done.stderr for reason in reasons), said
        assert not run.exists()
        return
    if stopped_by_other_experts(combination, done.stderr):
        return
    assert done.returncode == 0, said
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert (run / "export").is_dir()
