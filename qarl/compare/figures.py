"""Figures of finished cells, and of each variant over its seeds: as a table and as JSON."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from qarl.compare.commands import commands_left, evaluation_file, evaluation_options
from qarl.compare.comparison import Cell, Comparison, Figure, Variant
from qarl.evaluation.results import read_evaluation
from qarl.evaluation.statistics import estimate
from qarl.report.run_folder import RunFolder, read_metrics
from qarl.report.tables import PlainTable
from qarl.run.export_note import read_note

_STEP = ("seconds/sample", "seconds/score", "seconds/learn", "seconds/publish")
"""Phases of a step, without evaluation."""


@dataclass(frozen=True)
class Measured:
    """Figures of a finished cell."""

    accuracy: float | None
    """Held-out accuracy of the deployed checkpoint in a fresh engine, by the run's own `eval`. None
    if not measured.
    """
    evaluated: float | None
    """The same by the comparison's `evaluate`."""
    moved: float | None = None
    """Mean |Δ log p| of fixed sequences between a quantized checkpoint and the unquantized policy,
    nats.
    """
    figures: dict[str, float | None] = field(default_factory=dict)
    """The comparison's figures by name, None if no step measured it."""
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    """Metrics of the figures, step by step; empty for a quantized checkpoint."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Machine and versions it was trained with."""


def measured_cells(comparison: Comparison) -> dict[Cell, Measured]:
    """Return the figures of all finished cells, in the comparison's order."""
    finished = (cell for cell in comparison.cells() if not commands_left(comparison, cell))
    return {cell: _measured(comparison, cell) for cell in finished}


def _measured(comparison: Comparison, cell: Cell) -> Measured:
    folder = comparison.folder(cell)
    evaluated = None
    if comparison.evaluate:
        file = evaluation_file(comparison, cell, evaluation_options(comparison))
        evaluated = read_evaluation(file).mean().mean
    if cell.variant.quantized is not None:
        file = evaluation_file(comparison, cell)
        accuracy = read_evaluation(file).mean().mean if file.is_file() else None
        return Measured(accuracy=accuracy, evaluated=evaluated, moved=read_note(folder)["moved"])
    run = RunFolder.open(folder)
    steps = [
        {**step, "seconds": sum(step.get(phase, 0.0) for phase in _STEP)}
        for step in read_metrics(run.metrics)
    ]
    metrics = dict.fromkeys(figure.metric for figure in comparison.figures.values())
    return Measured(
        accuracy=read_note(run.export).get("heldout_accuracy"),
        evaluated=evaluated,
        figures={name: value_of(figure, steps) for name, figure in comparison.figures.items()},
        curves={metric: [step.get(metric) for step in steps] for metric in metrics},
        environment=json.loads((run.path / "environment.json").read_text()),
    )


def value_of(figure: Figure, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Return a run's figure. None if no step measured its metric, or none reached the bound."""
    values = [
        (step["step"], step[figure.metric]) for step in steps if step.get(figure.metric) is not None
    ]
    if figure.over == "reaches":
        return next((step for step, value in values if value >= figure.number), None)
    if figure.over != "mean":
        count = int(figure.number)
        values = values[:count] if figure.over == "first" else values[-count:]
    return fmean(value for _, value in values) if values else None


def rows(cells: Mapping[Cell, Measured]) -> list[dict[str, Any]]:
    """Return a row per variant, as data for JSON.

    Accuracies are means over seeds with standard error and bootstrap interval. Differences to
    reference and baseline are over the seeds that both variants have. Every other figure is a mean
    with its standard error.
    """
    by_variant: dict[Variant, dict[int, Measured]] = {}
    for cell, measured in cells.items():
        by_variant.setdefault(cell.variant, {})[cell.seed] = measured
    accuracies = {
        variant.name: _of_seeds(seeds, "accuracy") for variant, seeds in by_variant.items()
    }
    table = []
    for variant, seeds in by_variant.items():
        own = accuracies[variant.name]
        reference, baseline = (
            accuracies.get(name or "", {}) for name in (variant.reference, variant.baseline)
        )
        table.append(
            {
                "variant": variant.name,
                "seeds": list(seeds),
                "accuracies": own,
                "deployed": _estimate(list(own.values())),
                "evaluated": _estimate(list(_of_seeds(seeds, "evaluated").values())),
                "reference": variant.reference,
                "to_reference": _difference(own, reference),
                "baseline": variant.baseline,
                "to_baseline": _difference(own, baseline),
                "gap_closed": gap_closed(own, baseline, reference),
                "moved": _mean([each.moved for each in seeds.values()]),
                "figures": {
                    name: _mean([each.figures[name] for each in seeds.values()])
                    for name in next(iter(seeds.values())).figures
                },
            }
        )
    return table


def gap_closed(
    values: Mapping[int, float],
    baseline: Mapping[int, float],
    reference: Mapping[int, float],
) -> float | None:
    """Return the fraction of the gap from baseline to reference that is closed.

    It is computed from the means over the seeds that all three have. None if they share none, or if
    there is no gap: the baseline is not behind the reference, or the interval of the difference
    contains 0.
    """
    shared = sorted(values.keys() & baseline.keys() & reference.keys())
    if not shared:
        return None
    sides = (values, baseline, reference)
    own, low, high = (fmean(side[seed] for seed in shared) for side in sides)
    difference = estimate([baseline[seed] - reference[seed] for seed in shared])
    # with one seed, `difference.high` is NaN and the comparison false
    if low >= high or difference.high >= 0:
        return None
    return (own - low) / (high - low)


def remarks(cells: Mapping[Cell, Measured]) -> list[str]:
    """Return warnings for a reader of the figures.

    They name metrics that no step has, and differences in machine or versions between runs, which
    alone may change the figures.
    """
    curves = [measured.curves for measured in cells.values() if measured.curves]
    environments = [measured.environment for measured in cells.values() if measured.environment]
    lines = [
        f"no step measured {metric!r} (figures); docs/reference/metrics.md lists what there is"
        for metric in dict.fromkeys(itertools.chain(*curves))
        if all(value is None for curve in curves for value in curve[metric])
    ]
    for name in dict.fromkeys(itertools.chain(*environments)):
        values = list(dict.fromkeys(environment.get(name) for environment in environments))
        if len(values) > 1:
            lines.append(f"runs differ in {name}: {', '.join(map(str, values))}")
    return lines


def as_data(cells: Mapping[Cell, Measured]) -> dict[str, Any]:
    """Return the rows, and every cell with its curves, as data for JSON."""
    return {
        "rows": rows(cells),
        "cells": [
            {
                "variant": cell.variant.name,
                "seed": cell.seed,
                **dataclasses.asdict(measured),
            }
            for cell, measured in cells.items()
        ],
    }


def _of_seeds(seeds: Mapping[int, Measured], name: str) -> dict[int, float]:
    values = {seed: getattr(each, name) for seed, each in seeds.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _estimate(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    return dataclasses.asdict(estimate(values)) | {"error": _standard_error(values)}


def _difference(
    own: Mapping[int, float],
    other: Mapping[int, float],
) -> dict[str, Any] | None:
    shared = sorted(own.keys() & other.keys())
    return _estimate([own[seed] - other[seed] for seed in shared])


def _mean(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean, standard error and number of the values that were measured."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    return {
        "mean": fmean(present),
        "error": _standard_error(present),
        "count": len(present),
    }


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    return stdev(values) / math.sqrt(len(values))


def table(cells: Mapping[Cell, Measured]) -> PlainTable:
    """Return a table with a row per variant; columns that no variant has are left out."""
    lines = [_line(row) for row in rows(cells)]
    names = dict.fromkeys(name for line in lines for name in line)
    columns = [name for name in names if any(line.get(name) for line in lines)]
    shown = PlainTable(
        *columns,
        figures=[name for name in columns if name != "variant"],
        title=(
            "means over seeds ± standard error [95 % bootstrap interval]; accuracies %, differences"
            " in points"
        ),
        caption="\n".join(remarks(cells)),
    )
    for line in lines:
        shown.add_row(*(line.get(name, "") for name in columns))
    return shown


def _line(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a row by column, "" if there is nothing to show."""
    seeds = len(row["seeds"])
    closed = row["gap_closed"]
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


def _percent(figure: Mapping[str, Any] | None, sign: str = "") -> str:
    """Return an accuracy, or a difference of two, as text. sign: "+" for a difference."""
    if figure is None:
        return ""
    names = ("mean", "error", "low", "high")
    mean, error, low, high = (100 * figure[name] for name in names)
    spread = "" if math.isnan(error) else f" ± {error:.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"
    return f"{mean:{sign}.1f}{spread}"


def _number(figure: Mapping[str, Any] | None, seeds: int) -> str:
    """Return a mean as text, with the number of its seeds if those are not all."""
    if figure is None:
        return ""
    error = "" if math.isnan(figure["error"]) else f" ± {figure['error']:.1g}"
    some = "" if figure["count"] == seeds else f" ({figure['count']} of {seeds})"
    return f"{figure['mean']:.3g}{error}{some}"
