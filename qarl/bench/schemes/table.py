"""The grid's figures for a person: a table, JSON, plots."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qarl.bench.schemes.cell import Measured
from qarl.bench.schemes.curves import band, gap_closed, smoothed
from qarl.bench.schemes.grid import LEARNERS, Cell, Grid
from qarl.evaluation.statistics import estimate, paired
from qarl.report.plots import BarPanel, Bars, Line, LinePanel, draw
from qarl.report.tables import PlainTable

LAST = 10
"""Steps at the end over which a curve's last value is averaged."""
WINDOW = 5
"""Steps a plotted curve is averaged over."""

Found = Mapping[Cell, Measured]
Variant = tuple[str, str, str]
"""(scheme, learner, objective)."""


def table(found: Found) -> PlainTable:
    """A row a variant: deployed accuracy over seeds, its paired distance to the unquantized runs, the share of the gap
    from plain to unquantized that is closed, and where training went at its end."""
    figures = (
        "seeds", "deployed %", "sampled %", "to bf16", "gap closed", "reward", "entropy", "|Δ log p|", "|log w|",
        "error tokens", "clipped", "s/step",
    )  # fmt: skip
    title = "held-out accuracy of the deployed checkpoint in a fresh engine: means over seeds [95 % bootstrap interval]"
    shown = PlainTable("scheme", "learner", "objective", *figures, figures=figures, title=title)
    for row in rows(found):
        deployed, distance = row["deployed"], row["to_unquantized"]
        shown.add_row(
            row["scheme"], row["learner"], row["objective"], str(deployed["count"]), _points(deployed, ""),
            "" if row["sampled"] is None else f"{100 * row['sampled']:.1f}",
            _points(distance, "+") if distance else "", _share(row["gap_closed"]),
            *(_number(row["last"].get(name)) for name in ("reward", "entropy", "mean |Δ log p|", "mean |log w|")),
            _percent(row["last"].get("error tokens")), _percent(row["last"].get("clipped")),
            _number(row["seconds_a_step"]),
        )  # fmt: skip
    return shown


def rows(found: Found) -> list[dict[str, Any]]:
    """JSON-ready: what the table shows of each variant, and every seed's accuracy."""
    accuracies = {variant: {c.seed: m.accuracy for c, m in runs.items()} for variant, runs in _variants(found)}
    made = []
    for variant, runs in _variants(found):
        scheme, learner, objective = variant
        own, unquantized = accuracies[variant], accuracies.get(("bf16", "unquantized", objective), {})
        plain = accuracies.get((scheme, "plain", objective), {})
        distance = paired(own, unquantized) if learner != "unquantized" else None
        sampled = [m.sampled for m in runs.values() if m.sampled is not None]
        steps = [len(m.curves["reward"]) for m in runs.values() if m.curves]
        seconds = [
            sum(m.seconds.get(name, 0.0) for name in ("sample", "score", "learn", "publish")) for m in runs.values()
        ]
        made.append({
            "scheme": scheme, "learner": learner, "objective": objective, "accuracies": own,
            "deployed": dataclasses.asdict(estimate(list(own.values()))),
            "sampled": estimate(sampled).mean if sampled else None,
            "to_unquantized": distance and dataclasses.asdict(distance),
            "gap_closed": gap_closed(own, plain, unquantized) if learner not in ("unquantized", "plain") else None,
            "last": {name: _mean_of_last(runs, name) for name in next(iter(runs.values())).curves},
            "seconds_a_step": sum(seconds) / sum(steps) if steps else None,
        })  # fmt: skip
    return made


def as_data(found: Found) -> dict[str, Any]:
    """JSON-ready: the rows, and every cell with its curves."""
    cells = [{**dataclasses.asdict(cell), **dataclasses.asdict(measured)} for cell, measured in found.items()]
    return {"rows": rows(found), "cells": cells}


def plot(found: Found, grid: Grid, file: Path) -> list[Path]:
    """Curves of each scheme beside the unquantized seeds' band, and bars of what is deployed; as SVG and PNG."""
    panels: list[LinePanel | BarPanel] = []
    for curve in ("reward", "entropy", "mean |Δ log p|", "error tokens"):
        for scheme in grid.schemes:
            lines = [
                _line(variant, runs, curve) for variant, runs in _variants(found) if variant[0] in (scheme, "bf16")
            ]
            drawn = [line for line in lines if line is not None]
            if drawn:
                logarithmic = curve == "mean |Δ log p|" and any(y > 0 for line in drawn for y in line.y)
                panels.append(LinePanel(f"{scheme}: {curve}", "step", curve, drawn, logarithmic_y=logarithmic))
    panels += [_bars(found, scheme) for scheme in grid.schemes]
    return draw(panels, file)


def _variants(found: Found) -> Iterator[tuple[Variant, dict[Cell, Measured]]]:
    variants: dict[Variant, dict[Cell, Measured]] = {}
    for cell, measured in found.items():
        variants.setdefault((cell.scheme, cell.learner, cell.objective), {})[cell] = measured
    order = {name: place for place, name in enumerate(LEARNERS)}
    yield from sorted(variants.items(), key=lambda item: (item[0][0] != "bf16", item[0][0], order.get(item[0][1], 9)))


def _line(variant: Variant, runs: Mapping[Cell, Measured], curve: str) -> Line | None:
    """Mean over seeds, smoothed; the band is from the lowest seed to the highest."""
    curves = [[math.nan if v is None else v for v in m.curves[curve]] for m in runs.values() if m.curves]
    if not curves:
        return None
    mean, low, high = band([smoothed(values, WINDOW) for values in curves])
    _, learner, objective = variant
    steps = list(range(1, len(mean) + 1))
    return Line(label=f"{learner} {objective}", x=steps, y=mean, low=low, high=high)


def _bars(found: Found, scheme: str) -> BarPanel:
    bars = []
    for (of, learner, objective), runs in _variants(found):
        if of in (scheme, "bf16"):
            accuracy = estimate([m.accuracy for m in runs.values()])
            known = not math.isnan(accuracy.low)
            whiskers = {"low": [accuracy.low], "high": [accuracy.high]} if known else {}
            bars.append(Bars(f"{learner} {objective}", [accuracy.mean], **whiskers))
    return BarPanel(f"{scheme}: deployed accuracy", "held-out, greedy", [scheme], bars)


def _mean_of_last(runs: Mapping[Cell, Measured], name: str) -> float | None:
    values = [v for m in runs.values() for v in m.curves.get(name, [])[-LAST:] if v is not None]
    return sum(values) / len(values) if values else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if abs(value) < 0.01 else f"{value:.2f}"


def _points(of: Mapping[str, Any], sign: str) -> str:
    """An estimate in percent, or percentage points with a sign, and its interval."""
    mean, low, high = (format(100 * of[name], f"{sign}.1f") for name in ("mean", "low", "high"))
    return mean if math.isnan(of["low"]) else f"{mean} [{low}, {high}]"
