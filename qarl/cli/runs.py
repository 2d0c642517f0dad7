"""`qarl runs`: list run folders, one a line."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.configs.errors import ConfigError, QarlError
from qarl.evaluation.heldout import heldout
from qarl.report.run_folder import RunFolder
from qarl.report.start_note import read_start
from qarl.report.tables import PlainTable
from qarl.run.export_note import read_note


def add_runs(commands: Any) -> None:
    """Add `qarl runs` to the commands."""
    runs = commands.add_parser(
        "runs",
        help="List the runs in a folder: state, step, scheme, accuracy, age.",
        description=(
            "List runs, one a line, the most recently written first. Accuracy is shown before step"
            " 1 and as last measured, which is the export's if there is one. The exit status is 2"
            " if there is no run."
        ),
    )
    runs.add_argument(
        "folder",
        nargs="?",
        default="runs",
        metavar="DIR",
        help="Folder of run folders. Default: runs.",
    )
    runs.set_defaults(run=_runs)


def _runs(known: argparse.Namespace, console: Console) -> int:
    folder = Path(known.folder)
    runs = sorted(file.parent for file in folder.glob("*/config.yaml")) if folder.is_dir() else []
    if not runs:
        raise ConfigError(
            f"there is no run in {known.folder!r}; name the folder that run folders are in"
        )
    now = time.time()
    table = PlainTable("run", "state", "step", "scheme", "held-out", "age", figures=("step", "age"))
    for path in sorted(runs, key=_written, reverse=True):
        table.add_row(path.name, *_cells(RunFolder(path)), _age(now - _written(path)))
    table.show(console)
    return 0


def _cells(folder: RunFolder) -> tuple[str, str, str, str]:
    """Return the state, step, scheme and accuracy of a run. If it cannot be read, the state is the
    reason.
    """
    try:
        config = folder.config()
        lines = [""]
        if folder.metrics.is_file():
            lines = folder.metrics.read_text(encoding="utf-8").split("\n")
        # the last line may be incomplete while the run goes on
        metrics = [json.loads(line) for line in lines[:-1]]
        start = read_start(folder)
        note = read_note(folder.export)
        steps = metrics[-1]["step"] if metrics else 0
        last = heldout(note) or next(filter(None, map(heldout, reversed(metrics))), None)
    except (
        QarlError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        return f"unreadable: {' '.join(str(error).split())[:80]}", "", "", ""
    scheme = config.scheme if config.learner.aligned else f"{config.scheme}, plain learner"
    first = start and heldout(vars(start))
    accuracies = " → ".join(str(each) for each in (first, last) if each)
    return _state(folder, steps, config.steps), f"{steps}/{config.steps}", scheme, accuracies


def _state(folder: RunFolder, steps: int, planned: int) -> str:
    if folder.is_held():
        return "running"
    if steps < planned:
        return "stopped" if folder.steps() else "stopped, no checkpoint"
    return "exported" if folder.export.is_dir() else "finished"


def _written(run: Path) -> float:
    """Return when the run last wrote a step, or else began, in seconds since 1970."""
    metrics = run / "metrics.jsonl"
    return (metrics if metrics.is_file() else run / "config.yaml").stat().st_mtime


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
