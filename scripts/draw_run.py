"""Draw a finished run's dashboard as an SVG: python scripts/draw_run.py RUN FILE.svg"""

import io
import sys
from pathlib import Path

from rich.console import Console

from qarl.report.dashboard import Dashboard
from qarl.report.metrics import read_metrics, restored_step
from qarl.report.run_folder import RunFolder


def main(run: str, file: str) -> None:
    """Replay the run's metrics into a dashboard and save its last view."""
    folder = RunFolder.open(Path(run))
    console = Console(record=True, width=96, file=io.StringIO())
    replayed = 0.0  # seconds
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
