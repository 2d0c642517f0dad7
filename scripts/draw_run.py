"""Draw a finished run's dashboard as an SVG: python scripts/draw_run.py RUN FILE.svg"""

import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.learner.learn_stats import LearnStats
from qarl.learner.mismatch import Mismatch
from qarl.report.dashboard import Dashboard
from qarl.report.metrics import StepMetrics
from qarl.report.run_folder import RunFolder, read_metrics


def restored_step(flat: dict[str, Any]) -> StepMetrics:
    """Rebuild a step from its line of metrics.jsonl, as far as a dashboard shows it."""

    def part(prefix: str) -> dict[str, Any]:
        inner = {
            name.removeprefix(prefix): value
            for name, value in flat.items()
            if name.startswith(prefix)
        }
        return {name: value for name, value in inner.items() if "/" not in name}

    stats = None
    learn = part("learn/")
    if learn:
        own = {name: learn.pop(name) for name in LearnStats.__dataclass_fields__ if name in learn}
        stats = LearnStats(
            seconds={},
            mismatch=Mismatch(**part("learn/mismatch/")),
            records=learn,
            **own,
        )
    optional: dict[str, Any] = dict.fromkeys(StepMetrics.__dataclass_fields__)
    return StepMetrics(**optional | part("") | {"learn": stats, "seconds": part("seconds/")})


def main(run: str, file: str) -> None:
    """Replay the run's metrics into a dashboard and save its last view."""
    folder = RunFolder.open(Path(run))
    console = Console(record=True, width=96, file=io.StringIO())
    replayed = 0.0  # the dashboard's clock, in seconds
    dashboard = Dashboard(folder.config(), Console(file=io.StringIO()), clock=lambda: replayed)
    for line in read_metrics(folder.metrics):
        step = restored_step(line)
        replayed += sum(step.seconds.values())
        dashboard.stepped(step)
    dashboard.finished()
    console.print(dashboard.panel())
    console.save_svg(file, title="qarl train")


if __name__ == "__main__":
    main(*sys.argv[1:])
