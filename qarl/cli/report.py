"""`qarl report`: runs as one page. Loads neither torch nor vLLM."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.options import refuse_rest


def add_report(commands: Any) -> None:
    """Add `qarl report` to the commands."""
    report = commands.add_parser(
        "report",
        help="one page about one run or several: curves, mismatch, completions token by token",
        description="Write one self-contained page about one run or several, side by side; runs that differ in their "
        "seed alone share a curve with a band. It needs a browser and nothing else.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder, whole or still being written")
    report.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="page to write (default report.html); an older "
        "report there is replaced",
    )  # fmt: skip
    report.set_defaults(run=_report)


def _report(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    refuse_rest(rest)
    from qarl.page.build import check_output, report_page

    output = Path(known.output)
    check_output(output)
    page = report_page([Path(run) for run in known.runs]).encode("utf-8", errors="replace")
    output.write_bytes(page)
    size = f"{len(page) / 2**20:.2f} MiB"
    console.print(f"wrote {output}: {size}", soft_wrap=True, markup=False, highlight=False)
    return 0
