"""The figures of a report: curves over steps, time by phase, and the mismatch of tokens.

Curves have bands over seeds.
A figure is plain data that charts.js draws: `{"id", "title", "help", "x", "unit", "log", "lines":
[...]}`. A line is `{"of": its configuration's number, "name": its metric's name, "x", "y", "low",
"high"}`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from qarl.learner.diagnostics.figure import Figure
from qarl.page.runs import Configuration, Metrics

MOST_POINTS = 400
"""Upper bound on the points of a line.

Longer runs are averaged over as many steps as necessary. The lines of more than three
configurations share the points of three.
"""

POSITIONS = 48
"""Upper bound on the bins of a response's positions."""

_AGGREGATE: dict[str, Callable[[Sequence[float]], float]] = {
    "x": max,
    "y": fmean,
    "low": min,
    "high": max,
}
"""Part of a line → the function that makes one value of several."""

_MISMATCH = "learn/mismatch/"
CURVES = (
    Figure(
        id="reward",
        title="Reward",
        unit="",
        help="Mean over all completions of a step.",
        lines={"reward": "reward"},
    ),
    Figure(
        id="accuracy",
        title="Held-out accuracy",
        unit="share",
        help="On problems that are never trained on.",
        lines={"accuracy": "accuracy"},
    ),
    Figure(
        id="heldout",
        title="Held-out reward",
        unit="",
        help="Mean, on problems that are never trained on.",
        lines={"reward": "heldout_reward"},
    ),
    Figure(
        id="mismatch",
        title="Mismatch of learner and sampler",
        unit="nats",
        help="|log π_learner − log π_sampler| on the same tokens, before the update. 0 is perfect.",
        lines={"mean": f"{_MISMATCH}mean_abs", "largest": f"{_MISMATCH}max_abs"},
        logarithmic=True,
    ),
    Figure(
        id="clipped",
        title="Clipped and corrected tokens",
        unit="share",
        help=(
            "Ratio beyond a bound; those that precision alone put there (phantom); mismatch weight"
            " capped or masked."
        ),
        lines={
            "clipped": "learn/clipped",
            "phantom": "learn/phantom_clipped",
            "corrected": "learn/corrected",
        },
    ),
    Figure(
        id="entropy",
        title="Entropy",
        unit="nats a token",
        help="Of the policy, before the update.",
        lines={"entropy": "learn/entropy"},
    ),
    Figure(
        id="errors",
        title="Error tokens",
        unit="share",
        help=(
            "Tokens the sampler gave less than 0.001 (improbable), or that lie in a loop"
            " (repeated)."
        ),
        lines={"improbable": "improbable_tokens", "repeated": "repeated_tokens"},
    ),
    Figure(
        id="length",
        title="Response length",
        unit="tokens",
        help="Mean over completions, the EOS token included.",
        lines={"length": "response_tokens"},
    ),
    Figure(
        id="groups",
        title="Groups that teach, truncated completions",
        unit="share",
        help="Groups whose rewards differ; completions cut off at rollout.max_new_tokens.",
        lines={"groups that teach": "mixed_reward_groups", "truncated": "truncated"},
    ),
    Figure(
        id="gradient",
        title="Gradient norm",
        unit="",
        help="Of all masters, before clipping.",
        lines={"norm": "learn/grad_norm"},
    ),
)
"""Figures over steps of every run.

The learner's diagnostics (`learner.diagnostics`) add their own, which a run's start.json has.
"""


def diagnosed(kinds: Sequence[Configuration]) -> list[Figure]:
    """Return the figures that the runs' diagnostics add, each once."""
    starts = [run.start for kind in kinds for run in kind.runs if run.start]
    figures = {figure.id: figure for start in starts for figure in start.figures}
    return list(figures.values())


def curve_figures(kinds: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Return the figures over steps, without those that no run has values for."""
    most = min(MOST_POINTS, 3 * MOST_POINTS // len(kinds))
    added = [figure for figure in diagnosed(kinds) if figure.axis is None]
    figures = []
    for curve in (*CURVES, *added):
        lines = []
        for number, kind in enumerate(kinds):
            for name, field in curve.lines.items():
                line = _line(number, kind, name, field)
                if line is not None:
                    lines.append(thinned(line, most))
        if lines:
            figures.append(_chart_data(curve, "step", lines))
    return figures


def _chart_data(
    figure: Figure,
    axis: str,
    lines: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the figure as a dictionary for charts.js. axis: name of the x axis."""
    about = {
        "id": figure.id,
        "title": figure.title,
        "help": figure.help,
        "unit": figure.unit,
    }
    return {**about, "x": axis, "log": figure.logarithmic, "lines": lines}


def profile_figures(kinds: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Return the figures of metrics that are lists, as means over all steps that measured them.

    A figure whose values are all at x = 0 is left out.
    """
    figures = []
    for figure in diagnosed(kinds):
        if figure.axis is None:
            continue
        lines = []
        for number, kind in enumerate(kinds):
            metrics = [m for run in kind.runs for m in run.metrics]
            for name, field in figure.lines.items():
                lines += _profile(number, metrics, name, field, figure.places)
        if any(max(line["x"]) > 0 for line in lines):
            figures.append(_chart_data(figure, figure.axis, lines))
    return figures


def _profile(
    number: int, metrics: Sequence[Metrics], name: str, field: str, x_field: str | None
) -> list[dict[str, Any]]:
    """Return the line of a metric that is a list, over all steps; empty if no step has it.

    number: number of the configuration. x_field: metric that has the x values. Default: counted
    from 1.
    """
    values: dict[float, list[float]] = {}
    for step in metrics:
        y_values = step.get(field) or ()
        x_values = step[x_field] if x_field and y_values else range(1, len(y_values) + 1)
        for x, y in zip(x_values, y_values, strict=True):
            if y is not None:
                values.setdefault(float(x), []).append(y)
    return [thinned(_spread(number, name, values))] if values else []


def _line(
    number: int,
    kind: Configuration,
    name: str,
    field: str,
) -> dict[str, Any] | None:
    """Return the line of a metric over steps; None if no run has it. number: of `kind`."""
    by_step: dict[int, list[float]] = {}
    for run in kind.runs:
        series = _series(run.metrics, field)
        if field == "accuracy":  # held-out results have step 0 too
            series = {step: result.accuracy for step, result in run.heldout().items()}
        for step, value in series.items():
            by_step.setdefault(step, []).append(value)
    return _spread(number, name, by_step, len(kind.runs) > 1) if by_step else None


def _spread(
    number: int, name: str, values: Mapping[Any, Sequence[float]], band: bool = True
) -> dict[str, Any]:
    """Return the line of the mean at each x, with a band from the lowest to the highest value."""
    rows = sorted(values.items())
    steps = [x for x, _ in rows]
    line: dict[str, Any] = {"of": number, "name": name, "x": steps}
    for part in ("y", "low", "high") if band else ("y",):
        line[part] = [_AGGREGATE[part](y_values) for _, y_values in rows]
    return line


def _series(metrics: Sequence[Metrics], field: str) -> dict[int, float]:
    """Return step → value of a metric, without steps where it is missing or not finite."""
    by_step = {m["step"]: m.get(field) for m in metrics}
    return {
        step: value for step, value in by_step.items() if value is not None and math.isfinite(value)
    }


def thinned(
    line: dict[str, Any],
    most: int = MOST_POINTS,
) -> dict[str, Any]:
    """Return a line of at most `most` points, rounded to 4 digits.

    A point is the mean over consecutive ones, and its band reaches to their extremes.
    """
    every = -(-len(line["x"]) // most)
    starts = range(0, len(line["x"]), every)
    thin = dict(line)
    for part in line.keys() & _AGGREGATE.keys():
        values = [line[part][start : start + every] for start in starts]
        thin[part] = [digits(_AGGREGATE[part](several)) for several in values]
    return thin


def digits(value: float) -> float:
    """Round to 4 significant digits; an integral result is an int."""
    rounded = float(f"{value:.4g}") if abs(value) < 10**4 else float(round(value))
    return int(rounded) if rounded == int(rounded) else rounded


def time_split(kinds: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Return each configuration's seconds a step by phase, and within the learner's.

    Seconds are medians. Phases that few steps have, such as evaluations, are spread over all steps.
    """
    splits = []
    for number, kind in enumerate(kinds):
        metrics = [m for run in kind.runs for m in run.metrics]
        fields = dict.fromkeys(name for m in metrics for name in m if name.startswith("seconds/"))
        timed = {name: _seconds(metrics, name) for name in fields}
        learn = {
            name.removeprefix("seconds/learn/"): value
            for name, value in timed.items()
            if "/learn/" in name
        }
        phases = {
            name.removeprefix("seconds/"): value
            for name, value in timed.items()
            if "/learn/" not in name
        }
        splits.append({"of": number, "phases": phases, "learn": learn})
    return splits


def _seconds(metrics: Sequence[Metrics], field: str) -> float:
    """Return the seconds of a phase: the median of the steps that have it, times their fraction."""
    seconds = [m[field] for m in metrics if field in m]
    return digits(float(np.median(seconds)) * len(seconds) / len(metrics))


def mismatch_figures(
    columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray] | None], recorded: str
) -> list[dict[str, Any]]:
    """Return the figures of |Δ log p| by position in the response and by token probability.

    Args:
        columns: position, sampler's log-prob and mismatch of each configuration's recorded tokens,
            [n] each; None if it has none.
        recorded: description of these tokens, in words.
    """
    spread = f"Mean |Δ log p| over {recorded}; the band reaches to the 95th percentile."
    both = {"unit": "nats", "help": spread, "log": True}
    position = {
        "id": "by-position",
        "title": "Mismatch by position",
        "x": "position in the response",
    }
    probability = {
        "id": "by-probability",
        "title": "Mismatch by token probability",
        "x": "sampler's probability",
    }
    figures = [
        {**position, **both, "lines": []},
        {**probability, **both, "log_x": True, "lines": []},
    ]
    # Probabilities from 10⁻⁴ to 1, three bins a decade.
    decades = 10.0 ** np.arange(-4, 0.01, 1 / 3)
    for number, tokens in enumerate(columns):
        if tokens is None:
            continue
        positions, logprob, mismatch = tokens
        difference = np.abs(mismatch)
        longest = int(positions.max()) + 1
        # Positions are counted from 1; edges lie halfway between them.
        edges = np.linspace(0.5, longest + 0.5, min(longest, POSITIONS) + 1)
        figures[0]["lines"] += _binned(number, positions + 1.0, difference, edges)
        figures[1]["lines"] += _binned(number, np.exp(logprob), difference, decades, True)
    return [figure for figure in figures if figure["lines"]]


def _binned(
    number: int,
    x: np.ndarray,
    difference: np.ndarray,
    edges: np.ndarray,
    logarithmic: bool = False,
) -> list[dict[str, Any]]:
    """Return the line of mean and 95th percentile of `difference`, [n], in bins of x, [n].

    Values beyond the edges belong to the outermost bins. Bins that are empty or have mean 0, which
    a logarithmic axis cannot show, are left out. The list is empty if all are.
    """
    bin_numbers = np.clip(np.digitize(x, edges) - 1, 0, len(edges) - 2)
    left = edges[:-1]
    right = edges[1:]
    middles = np.sqrt(left * right) if logarithmic else (left + right) / 2
    x_values: list[float] = []
    means: list[float] = []
    high: list[float] = []
    for number_of_bin, middle in enumerate(middles):
        values = difference[bin_numbers == number_of_bin]
        if not len(values) or not values.mean() > 0:
            continue
        mean = float(values.mean())
        x_values.append(float(middle))
        means.append(mean)
        high.append(max(float(np.quantile(values, 0.95)), mean))
    if not means:
        return []
    line = {
        "of": number,
        "name": "mean",
        "x": x_values,
        "y": means,
        "low": means,
        "high": high,
    }
    return [thinned(line)]
