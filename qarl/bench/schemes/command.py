"""The benchmark from its options to its figures."""

from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.schemes.grid import Grid, checked
from qarl.bench.schemes.measure import measure
from qarl.bench.schemes.plot import plot
from qarl.bench.schemes.table import as_data, table
from qarl.report.tables import PlainTable


def run(
    grid: Grid, unsupported: dict[str, str], workers: int, picture: Path | None, console: Console
) -> tuple[PlainTable, Any, int]:
    """Check, measure and tell: the table, the figures JSON-ready, and the exit status: 1 where a cell failed.

    unsupported: scheme → why this machine cannot run it. picture: where to draw, without a suffix; None for no plots.
    """
    skipped = {name: reason for name, reason in unsupported.items() if name in grid.schemes}
    grid = checked(grid, unsupported)
    for name, reason in skipped.items():
        console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    found, failed = measure(grid, workers, console)
    if picture is not None and found:
        console.print(f"drawn: {', '.join(map(str, plot(found, picture)))}", highlight=False, soft_wrap=True)
    for cell in failed:
        console.print(f"failed: {cell.cell.name} ({cell.log}):\n{cell.reason}", markup=False, highlight=False)
    data = as_data(found) | {"failed": [cell.cell.name for cell in failed], "skipped": skipped}
    return table(found), data, 1 if failed else 0
