"""Whole commands in this process, on an engine of transformers: what a run of a few steps prints,
measures and leaves, also resumed, sampled ahead, replayed and evaluated; kept, so that a change of
the loop is seen. Blind to what a real engine does (tests/runs).

Record anew, where a change is meant: tests/support/records.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qarl.cli.main import main
from tests.support.cases import cases
from tests.support.records import assert_recorded
from tests.support.transformers_engine import use_transformers_engine

COMMANDS = cases(__file__, "commands")
"""What is done → the commands, one after another."""
NOISE = (
    "/mismatch/",
    "/log_ratio/",
    "/seconds/",
    "seconds/",
    "/lost",
    "digest",
    "advantage_corr",
    "/crossed",
    "slope",
)


def figures(run: Path) -> dict[str, Any]:
    """Of each step, but for what rounding alone decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    flat = {
        f"{run.name} {line['step']} {name}": value for line in lines for name, value in line.items()
    }
    numbers = {name: value for name, value in flat.items() if isinstance(value, int | float)}
    return {
        name: value for name, value in numbers.items() if not any(part in name for part in NOISE)
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_prints_measures_and_leaves(
    name: str, random_policy: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    use_transformers_engine(monkeypatch)
    # of a text that is at random
    for judge in ("scorers.exact_answer", "procedural.ReasoningGymTask.score"):
        monkeypatch.setattr(f"qarl.tasks.{judge}", lambda *of: sum(map(ord, of[-1])) % 4 / 3)
    shown = {}
    for line in COMMANDS[name]:
        model = ["--model", str(random_policy(True))] if "--config" in line else []
        status = main([*line.split(), *model])
        printed = capsys.readouterr()
        text = (printed.out + printed.err).replace(str(random_policy(True)), "MODEL")
        text = re.sub(
            r"\d[\d.]* s\b|ETA \S+|\S+ GiB|digest \S+|\d[\d.]*e-\d+|memory, planned.*",
            "…",
            text,
        )
        shown[line] = [status, *text.splitlines()]
    files = sorted(str(path) for path in Path("runs").rglob("*") if "tensorboard/" not in str(path))
    assert_recorded(__file__, f"{name}: what is shown", [shown, files])
    for run in sorted(Path("runs").iterdir()):
        assert_recorded(__file__, f"{name}: figures of {run.name}", figures(run), within=0.02)
