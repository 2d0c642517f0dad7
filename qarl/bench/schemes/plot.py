"""The grid's figures as a picture."""

import math
from collections.abc import Mapping
from pathlib import Path

from qarl.bench.names import LEARNERS
from qarl.bench.schemes.cell import Measured
from qarl.bench.schemes.curves import band, smoothed
from qarl.bench.schemes.grid import UNQUANTIZED, Cell
from qarl.bench.schemes.table import Found, Variant, variants
from qarl.evaluation.statistics import estimate
from qarl.report.plots import DotPanel, Dots, Line, LinePanel, Panel, draw

WINDOW = 5
"""Steps a plotted curve is averaged over."""

LAST_BITS = 1e-6
"""Mean |Δ log p| in nats, under which single tokens differ in their last bits and the others not at all: drawn linearly
from 0 on."""

CURVES = {
    "reward": ("mean reward", 1),
    "entropy": ("nats", 1),
    "mean |Δ log p|": ("nats", 1),
    "error tokens": ("% of the tokens", 100),
    "KL from the start": ("nats", 1),
}
"""What is drawn over the steps → its unit, and how many of these are 1."""


def plot(found: Found, file: Path) -> list[Path]:
    """Write `panels` as SVG and PNG, a column a scheme where there are several; returns both paths."""
    return draw(panels(found), file, columns=max(2, len(_schemes(found))))


def panels(found: Found) -> list[Panel]:
    """What is deployed, a point a seed; below it each curve, scheme by scheme, beside the unquantized runs'."""
    curves = [_curve(found, scheme, curve) for curve in CURVES for scheme in _schemes(found)]
    return [_deployed(found), *(panel for panel in curves if panel.lines)]


def _schemes(found: Found) -> list[str]:
    return list(dict.fromkeys(cell.scheme for cell in found if cell.scheme != UNQUANTIZED)) or [UNQUANTIZED]


def _deployed(found: Found) -> DotPanel:
    groups: dict[str, list[Dots]] = {}
    for variant, runs in variants(found):
        percent = [100 * measured.accuracy for measured in runs.values()]
        mean = estimate(percent)
        dots = Dots(label=_label(variant), values=percent, mean=mean.mean, low=mean.low, high=mean.high)
        groups.setdefault(variant[0], []).append(dots)
    return DotPanel(
        "deployed accuracy: every seed, their mean, its 95 % bootstrap interval",
        "held-out problems solved, greedy, % (the axis does not start at 0)",
        groups,
        groups.get(UNQUANTIZED, ()),
    )


def _curve(found: Found, scheme: str, curve: str) -> LinePanel:
    unit, scale = CURVES[curve]
    lines = [
        _line(variant, runs, curve, scale)
        for variant, runs in variants(found)
        if variant[0] in (scheme, UNQUANTIZED) and any(curve in measured.curves for measured in runs.values())
    ]
    means = [y for line in lines for y in line.y if not math.isnan(y)]
    lowest, highest = min(means, default=0.0), max(means, default=0.0)
    exact = curve == "mean |Δ log p|" and lowest < LAST_BITS < highest
    decades = curve != "reward" and lowest > 0 and highest > 10 * lowest
    return LinePanel(
        f"{scheme}: {curve}", "step", unit, lines, logarithmic_y=exact or decades,
        linear_below=LAST_BITS if exact else None,
    )  # fmt: skip


def _line(variant: Variant, runs: Mapping[Cell, Measured], curve: str, scale: float) -> Line:
    """Mean over seeds, smoothed; the band is from the lowest seed to the highest. What is measured now and then is
    drawn where it is."""
    kept = [m.curves[curve] for m in runs.values() if curve in m.curves]
    seeds = [[math.nan if v is None else scale * v for v in values] for values in kept]
    mean, low, high = band([smoothed(values, WINDOW) for values in seeds])
    steps = list(range(1, len(mean) + 1))
    measured = [n for n, values in enumerate(zip(*seeds, strict=False)) if not all(map(math.isnan, values))]
    if len(measured) < len(steps) / 2:
        mean, low, high = band([[values[n] for n in measured] for values in seeds])
        steps = [n + 1 for n in measured]
    broad = variant[0] == UNQUANTIZED
    return Line(label=_label(variant), x=steps, y=mean, low=low, high=high, broad=broad)


def _label(variant: Variant) -> str:
    """The same in every scheme, and so of one colour."""
    _, learner, objective = variant
    return f"{learner} {objective}" if learner in LEARNERS else f"{UNQUANTIZED} + {learner} {objective}"
