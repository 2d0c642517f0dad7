"""The grid's figures as a table and as JSON."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from qarl.bench.names import LEARNERS
from qarl.bench.schemes.cell import Measured
from qarl.bench.schemes.curves import gap_closed
from qarl.bench.schemes.grid import Cell
from qarl.evaluation.statistics import estimate, paired
from qarl.report.tables import PlainTable

LAST = 10
"""Steps at the end over which a curve's last value is averaged."""

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
    caption = "\n".join(
        f"{of['scheme']}: aligned + tbpo against plain + grpo: {_points(of['ahead'], '+')} points"
        + ("" if of["gap_closed"] is None else f", {of['gap_closed']:.0%} of the gap to bf16 + grpo")
        for of in method(found)
    )
    shown = PlainTable("scheme", "learner", "objective", *figures, figures=figures, title=title, caption=caption)
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
    accuracies = {variant: {c.seed: m.accuracy for c, m in runs.items()} for variant, runs in variants(found)}
    made = []
    for variant, runs in variants(found):
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


def method(found: Found) -> list[dict[str, Any]]:
    """JSON-ready: the whole method against the usual practice, of each scheme that has both, as the paper's table 1
    compares (arXiv 2604.07853): how far aligned TBPO is ahead of plain GRPO, and the share of the gap from there to
    bf16 GRPO that is closed."""
    accuracies = {variant: {c.seed: m.accuracy for c, m in runs.items()} for variant, runs in variants(found)}
    unquantized, made = accuracies.get(("bf16", "unquantized", "grpo"), {}), []
    for scheme in dict.fromkeys(scheme for scheme, *_ in accuracies):
        own, plain = (accuracies.get((scheme, *of), {}) for of in (("aligned", "tbpo"), ("plain", "grpo")))
        if ahead := paired(own, plain):
            closed = gap_closed(own, plain, unquantized)
            made.append({"scheme": scheme, "ahead": dataclasses.asdict(ahead), "gap_closed": closed})
    return made


def as_data(found: Found) -> dict[str, Any]:
    """JSON-ready: the rows, the whole method, and every cell with its curves."""
    cells = [{**dataclasses.asdict(cell), **dataclasses.asdict(measured)} for cell, measured in found.items()]
    return {"rows": rows(found), "method": method(found), "cells": cells}


def from_data(data: Mapping[str, Any]) -> dict[Cell, Measured]:
    """The cells of `as_data`, as a record has them."""
    keys = [field.name for field in dataclasses.fields(Cell)]
    return {
        Cell(**{key: cell[key] for key in keys}): Measured(**{k: v for k, v in cell.items() if k not in keys})
        for cell in data["cells"]
    }


def variants(found: Found) -> Iterator[tuple[Variant, dict[Cell, Measured]]]:
    """Runs of all seeds together: the unquantized first, then scheme by scheme, trained before quantized afterwards."""
    seeds: dict[Variant, dict[Cell, Measured]] = {}
    for cell, measured in found.items():
        seeds.setdefault((cell.scheme, cell.learner, cell.objective), {})[cell] = measured
    order = {name: place for place, name in enumerate(LEARNERS)}
    yield from sorted(seeds.items(), key=lambda item: (item[0][0] != "bf16", item[0][0], order.get(item[0][1], 9)))


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
