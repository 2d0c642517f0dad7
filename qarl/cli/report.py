"""`qarl report`: write runs as one page. Loads neither torch nor vLLM."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import say
from qarl.configs.files import written_aside

_SECONDS = 10
"""Shortest interval in seconds between two readings of runs that are watched."""


def add_report(commands: Any) -> None:
    """Add `qarl report` to the commands."""
    report = commands.add_parser(
        "report",
        help="Write a page about one run or several: curves, mismatch, completions token by token.",
        description=(
            "Write one self-contained page about one run or several, side by side. Runs that"
            " differ only in their seed share a curve with a band. The page needs a browser and"
            " nothing else."
        ),
    )
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="Run folder, of a finished run or one that is still training.",
    )
    report.add_argument(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE",
        help="Page to write, in place of an older report. Default: report.html.",
    )
    report.add_argument(
        "--watch",
        action="store_true",
        help=(
            "Write the page again after new steps until the runs are finished. A browser that has"
            " it open follows."
        ),
    )
    report.set_defaults(run=_report)


def _report(known: argparse.Namespace, console: Console) -> int:
    from qarl.page.build import check_output, report_page
    from qarl.page.runs import RecordedRun, read_runs

    output = Path(known.output)
    paths = [Path(run) for run in known.runs]
    check_output(output)

    def write(runs: list[RecordedRun], refresh: int = 0) -> None:
        page = report_page(runs, refresh).encode("utf-8", errors="replace")
        # so that a browser loads a complete page, the new one or the one before
        with written_aside(output) as building:
            building.write_bytes(page)
        steps = ", ".join(
            f"{run.name} {run.metrics[-1]['step']} of {run.config.steps} steps" for run in runs
        )
        size = f"{len(page) / 2**20:.2f} MiB"
        say(console, f"wrote {output}: {size}; {steps}")

    runs = read_runs(paths)
    if known.watch:
        _follow(runs, lambda: read_runs(paths), write)
    else:
        write(runs)
    return 0


def _follow(
    runs: Any,
    read: Callable[[], Any],
    write: Callable[..., None],
) -> None:
    """Write the page whenever a run has new steps, until all runs are finished.

    This takes at most a tenth of a core's time.
    """
    done: list[int] = []
    while not all(run.finished for run in runs):
        began = time.monotonic()
        if done != [run.metrics[-1]["step"] for run in runs]:
            done = [run.metrics[-1]["step"] for run in runs]
            write(runs, _SECONDS)
        time.sleep(max(_SECONDS, 9 * (time.monotonic() - began)))
        runs = read()
    write(runs)
