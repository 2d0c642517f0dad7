"""A comparison's figures for a person."""

import math
from collections.abc import Mapping
from typing import Any

from qarl.compare.comparison import Cell
from qarl.compare.figures import Measured, remarks, rows
from qarl.report.tables import PlainTable


def table(cells: Mapping[Cell, Measured]) -> PlainTable:
    """A row a variant; columns that no variant has are left out."""
    lines = [_line(row) for row in rows(cells)]
    names = dict.fromkeys(name for line in lines for name in line)
    columns = [name for name in names if any(line.get(name) for line in lines)]
    shown = PlainTable(
        *columns,
        figures=[name for name in columns if name != "variant"],
        title="means over seeds ± standard error [95 % bootstrap interval]; accuracies %, differences in points",
        caption="\n".join(remarks(cells)),
    )
    for line in lines:
        shown.add_row(*(line.get(name, "") for name in columns))
    return shown


def _line(row: Mapping[str, Any]) -> dict[str, str]:
    """Column → cell, "" where there is nothing to show."""
    seeds, closed = len(row["seeds"]), row["gap_closed"]
    fixed = {
        "variant": row["variant"],
        "seeds": str(seeds),
        "each seed": ", ".join(f"{100 * accuracy:.1f}" for accuracy in row["accuracies"].values()),
        "deployed": _percent(row["deployed"]),
        "evaluated": _percent(row["evaluated"]),
        "to reference": _percent(row["to_reference"], "+"),
        "to baseline": _percent(row["to_baseline"], "+"),
        "gap closed": "" if closed is None else f"{closed:.0%}",
        "|Δ log p| moved": _number(row["moved"], seeds),
    }
    return fixed | {name: _number(figure, seeds) for name, figure in row["figures"].items()}


def _percent(of: Mapping[str, Any] | None, sign: str = "") -> str:
    """An accuracy, or a difference of two with its sign."""
    if of is None:
        return ""
    mean, error, low, high = (100 * of[name] for name in ("mean", "error", "low", "high"))
    spread = "" if math.isnan(error) else f" ± {error:.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"
    return f"{mean:{sign}.1f}{spread}"


def _number(of: Mapping[str, Any] | None, seeds: int) -> str:
    """A mean; with the seeds it is of where those are not all."""
    if of is None:
        return ""
    error = "" if math.isnan(of["error"]) else f" ± {of['error']:.1g}"
    some = "" if of["count"] == seeds else f" ({of['count']} of {seeds})"
    return f"{of['mean']:.3g}{error}{some}"
