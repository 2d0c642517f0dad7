"""`qarl report`: write runs as one page. Loads neither torch nor vLLM."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import say
from qarl.configs.files import written_aside


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
    report.set_defaults(run=_report)


def _report(known: argparse.Namespace, console: Console) -> int:
    from qarl.page.build import check_output, report_page
    from qarl.page.runs import read_runs

    output = Path(known.output)
    check_output(output)
    runs = read_runs([Path(run) for run in known.runs])
    page = report_page(runs).encode("utf-8", errors="replace")
    # so that a browser loads a complete page, the new one or the one before
    with written_aside(output) as building:
        building.write_bytes(page)
    steps = ", ".join(
        f"{run.name} {run.metrics[-1]['step']} of {run.config.steps} steps" for run in runs
    )
    say(console, f"wrote {output}: {len(page) / 2**20:.2f} MiB; {steps}")
    return 0
