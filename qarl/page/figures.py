"""What a report draws: curves over steps with bands over seeds, time by phase, and figures made of
token columns.

A figure is plain data, drawn by charts.js: `{"id", "title", "help", "x", "unit", "log", "lines":
[...]}`, a line `{"of": place of its configuration, "name": of its metric, "x", "y", "low",
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
"""Of a line; longer runs are averaged over as many steps as keep it within that. Where there are
more than three configurations, their lines share the points of three.
"""

POSITIONS = 48
"""Bins of a response's length, at most."""

_TOGETHER: dict[str, Callable[[Sequence[float]], float]] = {
    "x": max,
    "y": fmean,
    "low": min,
    "high": max,
}
"""What several values become in each part of a line."""

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
"""Of every run. What diagnostics measured is drawn as they ask (`learner.diagnostics`), by a run's
start.json.
"""


def diagnosed(kinds: Sequence[Configuration]) -> list[Figure]:
    """What the runs' diagnostics ask for, each once."""
    starts = [run.start for kind in kinds for run in kind.runs if run.start]
    return list({figure.id: figure for start in starts for figure in start.figures}.values())


def curve_figures(kinds: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Those over steps that any run has values for."""
    most = min(MOST_POINTS, 3 * MOST_POINTS // len(kinds))
    figures = []
    for curve in (
        *CURVES,
        *(figure for figure in diagnosed(kinds) if figure.axis is None),
    ):
        lines = [
            thinned(line, most)
            for number, kind in enumerate(kinds)
            for name, field in curve.lines.items()
            if (line := _line(number, kind, name, field))
        ]
        if lines:
            figures.append(_drawn(curve, "step", lines))
    return figures


def _drawn(figure: Figure, axis: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """As charts.js takes it."""
    about = {
        "id": figure.id,
        "title": figure.title,
        "help": figure.help,
        "unit": figure.unit,
    }
    return {**about, "x": axis, "log": figure.logarithmic, "lines": lines}


def profile_figures(kinds: Sequence[Configuration]) -> list[dict[str, Any]]:
    """What steps measure as lists, unless all of it is at place 0: means over all steps that
    did.
    """
    measured = [[m for run in kind.runs for m in run.metrics] for kind in kinds]
    figures = []
    for figure in diagnosed(kinds):
        if figure.axis is None:
            continue
        lines = [
            line
            for number, metrics in enumerate(measured)
            for name, field in figure.lines.items()
            for line in _profile(number, metrics, name, field, figure.places)
        ]
        if any(max(line["x"]) > 0 for line in lines):
            figures.append(_drawn(figure, figure.axis, lines))
    return figures


def _profile(
    number: int, metrics: Sequence[Metrics], name: str, field: str, x_field: str | None
) -> list[dict[str, Any]]:
    """The line of a metric that is a list, over steps; none where no step has it. x_field: the
    metric that holds the places; without one they are counted from 1.
    """
    values: dict[float, list[float]] = {}
    for of_step in metrics:
        y = of_step.get(field) or ()
        for place, value in zip(
            of_step[x_field] if x_field and y else range(1, len(y) + 1), y, strict=True
        ):
            if value is not None:
                values.setdefault(float(place), []).append(value)
    return [thinned(_spread(number, name, values))] if values else []


def _line(number: int, kind: Configuration, name: str, field: str) -> dict[str, Any] | None:
    values = [_series(run.metrics, field) for run in kind.runs]
    if field == "accuracy":
        values = [
            {step: each.accuracy for step, each in run.heldout().items()} for run in kind.runs
        ]
    at_steps = {
        step: [each[step] for each in values if step in each]
        for series in values
        for step in series
    }
    return _spread(number, name, at_steps, len(kind.runs) > 1) if at_steps else None


def _spread(
    number: int, name: str, values: Mapping[Any, Sequence[float]], band: bool = True
) -> dict[str, Any]:
    """The line of the mean at each x, with a band from the lowest to the highest."""
    rows = sorted(values.items())
    parts = ("y", "low", "high") if band else ("y",)
    line = {"of": number, "name": name, "x": [x for x, _ in rows]}
    return line | {part: [_TOGETHER[part](each) for _, each in rows] for part in parts}


def _series(metrics: Sequence[Metrics], field: str) -> dict[int, float]:
    by_step = {m["step"]: m.get(field) for m in metrics}
    return {
        step: value for step, value in by_step.items() if value is not None and math.isfinite(value)
    }


def thinned(line: dict[str, Any], most: int = MOST_POINTS) -> dict[str, Any]:
    """At most `most` points, each a mean over consecutive ones (of bands the extremes), to 4
    digits.
    """
    every = -(-len(line["x"]) // most)
    spans = range(0, len(line["x"]), every)
    return {
        name: (
            [digits(_TOGETHER[name](value[start : start + every])) for start in spans]
            if name in _TOGETHER
            else value
        )
        for name, value in line.items()
    }


def digits(value: float) -> float:
    """Rounded to 4 significant digits; a whole number as one."""
    rounded = float(f"{value:.4g}") if abs(value) < 10**4 else float(round(value))
    return int(rounded) if rounded == int(rounded) else rounded


def time_split(kinds: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Per configuration: median seconds a step by phase, evaluations spread over steps; those
    within learning.
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
    """A step's. Median over the steps that have the phase, times the share of steps that do."""
    seconds = [m[field] for m in metrics if field in m]
    return digits(float(np.median(seconds)) * len(seconds) / len(metrics))


def mismatch_figures(
    columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray] | None], recorded: str
) -> list[dict[str, Any]]:
    """Where learner and sampler part. columns: of each configuration position, sampler log-prob and
    mismatch of its recorded tokens, [n] each; None where it has none. recorded: which tokens these
    are, in words.
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
    for number, of_kind in enumerate(columns):
        if of_kind is None:
            continue
        at, logprob, mismatch = of_kind
        apart, longest = np.abs(mismatch), int(at.max()) + 1
        places = np.linspace(0.5, longest + 0.5, min(longest, POSITIONS) + 1)
        figures[0]["lines"] += _binned(number, at + 1.0, apart, places)
        figures[1]["lines"] += _binned(
            number, np.exp(logprob), apart, 10.0 ** np.arange(-4, 0.01, 1 / 3), True
        )
    return [figure for figure in figures if figure["lines"]]


def _binned(
    number: int,
    x: np.ndarray,
    apart: np.ndarray,
    edges: np.ndarray,
    logarithmic: bool = False,
) -> list[dict[str, Any]]:
    """Mean and 95th percentile of `apart` in the bins of x that hold anything; the outermost hold
    what is beyond.
    """
    place = np.clip(np.digitize(x, edges) - 1, 0, len(edges) - 2)
    bins = [b for b in range(len(edges) - 1) if (place == b).any() and apart[place == b].mean() > 0]
    if not bins:
        return []
    middles = np.sqrt(edges[:-1] * edges[1:]) if logarithmic else (edges[:-1] + edges[1:]) / 2
    means = [float(apart[place == b].mean()) for b in bins]
    high = [
        max(float(np.quantile(apart[place == b], 0.95)), mean)
        for b, mean in zip(bins, means, strict=True)
    ]
    x_values = [float(middles[b]) for b in bins]
    return [
        thinned(
            {
                "of": number,
                "name": "mean",
                "x": x_values,
                "y": means,
                "low": means,
                "high": high,
            }
        )
    ]
