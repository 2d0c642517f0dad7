"""One cell of the grid, in a process of its own: one engine a process, and one that ends takes only its cell along.

    python -m qarl.bench.schemes.cell '{"cell": {…}, "grid": {…}}'     (see `Job`)

writes the cell's record (`Grid.record`): when it begins, what the figures depend on (`grid.stamp`); when it has
ended, the figures (`Measured`).
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.names import LEARNERS
from qarl.bench.runs import finished_run
from qarl.bench.schemes.grid import Cell, Grid, refuse_mixed, stamp
from qarl.configs.errors import QarlError
from qarl.configs.schema.run import EvalConfig
from qarl.report.metrics import read_metrics
from qarl.report.run_folder import RunFolder
from qarl.rollout.open import open_engine
from qarl.run.evaluate import answered
from qarl.run.prompts import open_prompter
from qarl.tasks import load_task

CURVES = {
    "reward": "reward",
    "entropy": "learn/entropy",
    "mean |Δ log p|": "learn/mismatch/mean_abs",
    "mean |log w|": "learn/mismatch/mean_abs_log_w",
    "k3": "learn/mismatch/k3",
    "error tokens": "error_tokens",
    "clipped": "learn/clipped",
    "corrected": "learn/corrected",
    "response tokens": "response_tokens",
    "KL from the start": "learn/kl_from_start",
}
"""What is kept of every step, or of those at which it is measured → its metric (docs/metrics.md)."""


@dataclass(frozen=True)
class Job:
    """What the child process is asked for."""

    cell: Cell
    grid: Grid

    def as_argument(self) -> str:
        """For the child's command line."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @staticmethod
    def from_argument(text: str) -> "Job":
        """The inverse of `as_argument`."""
        tree = json.loads(text)
        grid: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree["grid"].items()}
        grid["runs"] = Path(grid["runs"])
        return Job(Cell(**tree["cell"]), Grid(**grid))


@dataclass(frozen=True)
class Measured:
    """accuracy: held-out, greedy, of the deployable checkpoint in a fresh engine, in [0, 1]. sampled: avg@samples at
    the grid's temperature, None where that was left out. Empty but for trained cells: curves: of `CURVES`, a value a
    step, None where it did not learn or was not measured; heldout: [step, accuracy] during training; seconds: of all
    steps, by phase."""

    accuracy: float
    sampled: float | None
    curves: dict[str, list[float | None]]
    heldout: list[list[float]]
    seconds: dict[str, float]


def run(job: Job, console: Console) -> Measured:
    """Train the cell's run or find it, quantize where that is asked for, evaluate, and keep the figures."""
    grid, cell = job.grid, job.cell
    record = grid.record(cell)
    refuse_mixed(record)
    if not record.is_file():
        _write(record, {"stamp": stamp(), "cell": dataclasses.asdict(cell)})
    folder = finished_run(grid.config(cell), console)
    if cell.learner in LEARNERS:
        measured = _of_steps(read_metrics(folder.metrics), *_accuracies(folder.export, folder, grid))
    else:
        measured = Measured(*_quantized(folder, cell, grid), curves={}, heldout=[], seconds={})
    _write(record, {**json.loads(record.read_text()), "measured": dataclasses.asdict(measured)})
    return measured


def _accuracies(checkpoint: Path, folder: RunFolder, grid: Grid) -> tuple[float, float | None]:
    """Greedy and sampled, of a checkpoint in a fresh engine, on the held-out problems of the run's task."""
    config = folder.config()
    prompter = open_prompter(checkpoint, config.rollout, config.task)
    task = load_task(config.task).shortened(prompter.fits)
    with open_engine(checkpoint, config.rollout, config.dtype) as engine:
        asking = EvalConfig(problems=config.eval.problems)
        greedy = answered(engine, task, prompter, asking, config.rollout).accuracy
        if not grid.samples:
            return greedy, None
        many = asking.model_copy(update={"samples": grid.samples, "temperature": grid.temperature})
        return greedy, answered(engine, task, prompter, many, config.rollout).accuracy


def _quantized(folder: RunFolder, cell: Cell, grid: Grid) -> tuple[float, float | None]:
    from qarl.ptq.export import check_request, quantize
    from qarl.ptq.source import open_source

    count = check_request(folder.config(), str(folder.path), cell.learner, cell.scheme, None)
    with tempfile.TemporaryDirectory(prefix=".ptq-", dir=folder.path) as work:
        source = open_source(folder, Path(work), cell.scheme, count)
        quantize(source, cell.learner, Path(work) / "quantized")
        return _accuracies(Path(work) / "quantized", folder, grid)


def _of_steps(steps: list[dict[str, Any]], accuracy: float, sampled: float | None) -> Measured:
    seconds: dict[str, float] = {}
    for name, value in (pair for step in steps for pair in step.items() if pair[0].startswith("seconds/")):
        seconds[name.removeprefix("seconds/")] = seconds.get(name.removeprefix("seconds/"), 0.0) + value
    return Measured(
        accuracy=accuracy,
        sampled=sampled,
        curves={label: [step.get(metric) for step in steps] for label, metric in CURVES.items()},
        heldout=[[step["step"], step["accuracy"]] for step in steps if "accuracy" in step],
        seconds=seconds,
    )


def _write(record: Path, tree: dict[str, Any]) -> None:
    """All of it or nothing: a cell may be killed at any time."""
    new = record.with_suffix(".new")
    new.write_text(json.dumps(tree) + "\n")
    new.replace(record)


def main(arguments: Iterable[str]) -> None:
    """The child's whole life."""
    (text,) = arguments
    try:
        run(Job.from_argument(text), Console(force_terminal=False))
    except QarlError as error:  # in words, for the log's end is what the parent shows
        sys.exit(f"{error.heading}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
