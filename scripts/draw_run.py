"""Draw a finished run's dashboard as an SVG: python scripts/draw_run.py RUN FILE.svg"""

import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from learner.decomposition import Decomposition
from learner.learner import LearnStats
from learner.mismatch import Mismatch
from qarl.report.dashboard import Dashboard
from qarl.report.metrics import StepMetrics, read_metrics
from qarl.report.run_folder import RunFolder


def restored(flat: dict[str, Any]) -> StepMetrics:
    """A `StepMetrics` from a line of metrics.jsonl."""

    def part(prefix: str) -> dict[str, Any]:
        found = {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}
        return {k: v for k, v in found.items() if "/" not in k}

    learn = part("learn/")
    parts = {"mismatch": Mismatch(**part("learn/mismatch/")), "log_ratio": Decomposition(**part("learn/log_ratio/"))}
    stats = LearnStats(**parts, seconds={}, **learn) if learn else None
    unmeasured = ("accuracy", "digest", "error_tokens_negative", "error_tokens_positive")
    optional: dict[str, Any] = dict.fromkeys(unmeasured)
    return StepMetrics(**optional | part(""), learn=stats, seconds=part("seconds/"))


def main(run: str, file: str) -> None:
    """Replay the run's metrics into a dashboard and save its last view."""
    folder = RunFolder.open(Path(run))
    console = Console(record=True, width=96, file=io.StringIO())
    replayed = 0.0  # seconds
    dashboard = Dashboard(folder.config(), Console(file=io.StringIO()), clock=lambda: replayed)
    for line in read_metrics(folder.metrics):
        step = restored(line)
        replayed += sum(step.seconds.values())
        dashboard.stepped(step)
    dashboard.finished()
    console.print(dashboard.panel())
    console.save_svg(file, title="qarl train")


if __name__ == "__main__":
    main(*sys.argv[1:])
