"""Benchmarks' figures as pictures: lines with bands, dots in rows, bars in groups, each picture as SVG and as PNG.

A label has one colour in all panels of a picture: eight that colour-blind readers tell apart (Okabe and Ito's, the
yellow darkened), the next eight dashed, hollow or hatched. The SVG is a function of what is drawn: no dates, no
random names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError

SUFFIXES = (".svg", ".png")
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C00", "#000000")
_PANEL_INCHES = (5.2, 3.4)
_BARS_SHARE = 0.8
"""Of a group's width; the rest parts it from the next."""

_LETTERS = 43
"""Of groups' names, that a panel is wide enough for."""

_ROW_INCHES = 0.24
"""Of a row of dots."""

_AROUND_ROWS_INCHES = 0.9
"""Title, ticks and label of a panel of dots."""

_FEW_DECADES = 3
"""Up to which a logarithmic axis has ticks between powers of ten."""

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.w_pad": 0.1,  # inches
    "font.size": 10,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qarl",
}


@dataclass(frozen=True)
class Line:
    """One curve: y over x, of one length. low, high: edges of the band around it, both or neither. NaN is a gap.
    broad: so that it is seen under a line that coincides with it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    broad: bool = False


@dataclass(frozen=True)
class Dots:
    """One row: a small point for each value, a large one at their mean, a line from `low` to `high` (NaN: none)."""

    label: str
    values: Sequence[float]
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Bars:
    """One bar in each group of its panel. low, high: ends of the whiskers, both or neither. NaN draws nothing."""

    label: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class LinePanel:
    """reference: a dashed horizontal line, such as 1.0 where ratios are drawn. logarithmic: of the axis; x then has a
    tick at each of its values where they are few (batch sizes). linear_below: a power of ten, under which a logarithmic
    y is linear, so that zeros have a place; the axis says so."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    reference: float | None = None
    logarithmic_x: bool = False
    logarithmic_y: bool = False
    linear_below: float | None = None


@dataclass(frozen=True)
class DotPanel:
    """Rows of dots, as wide as the picture, over an axis cut to them. groups: name → rows, from the top. references:
    rows whose mean is a vertical line through all others, and whose interval is a band."""

    title: str
    x_label: str
    groups: Mapping[str, Sequence[Dots]]
    references: Sequence[Dots] = ()


@dataclass(frozen=True)
class BarPanel:
    """groups: names along x. bars: side by side within each group, or with `stacked` one on the other, in their order
    (without whiskers then). reference: a dashed horizontal line."""

    title: str
    y_label: str
    groups: Sequence[str]
    bars: Sequence[Bars]
    stacked: bool = False
    reference: float | None = None


Panel = LinePanel | DotPanel | BarPanel


def plot_stem(option: str, file: str) -> Path:
    """`NAME`, `NAME.svg` or `NAME.png`, as a person gave it to `option` → the path without that suffix. Raises
    `ConfigError` where neither file could be written; before the work, not after it."""
    path = Path(file)
    if path.suffix in SUFFIXES:
        path = path.with_suffix("")
    folders = [f"{path}{suffix}" for suffix in SUFFIXES if Path(f"{path}{suffix}").is_dir()]
    if folders:
        raise ConfigError(f"{option} {file}: {folders[0]!r} is a folder; name a file elsewhere")
    if not path.name or not path.parent.is_dir():
        raise ConfigError(
            f"{option} {file}: {str(path.parent)!r} is no folder; name a file in one that is there, such as plot.svg"
        )
    return path


def draw(panels: Sequence[Panel], stem: Path, title: str = "", columns: int = 2) -> list[Path]:
    """Write `stem`.svg and `stem`.png (150 dots an inch), the panels row by row; returns both paths.

    Raises `ValueError` where lengths of what belongs together differ, or there is nothing to draw.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("no panels to draw")
    for panel in panels:
        _require_lengths(panel)
    columns = min(columns, len(panels))
    labels = dict.fromkeys(series.label for panel in panels for series in _series(panel))
    looks = {label: _Look(_COLOURS[i % len(_COLOURS)], i >= len(_COLOURS)) for i, label in enumerate(labels)}
    blocks = _blocks(panels)
    heights = [_inches(block, columns) for block in blocks]
    with rc_context(_STYLE):
        figure = Figure((columns * _PANEL_INCHES[0], sum(heights)), layout="constrained")
        if title:
            figure.suptitle(title)
        parts = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, block in zip(parts, blocks, strict=True):
            _draw_block(part, block, columns, looks)
        files = [Path(f"{stem}{suffix}") for suffix in SUFFIXES]
        figure.savefig(files[0], metadata={"Date": None, "Creator": None})
        figure.savefig(files[1], dpi=150, metadata={"Software": None})
    return files


def _blocks(panels: Sequence[Panel]) -> list[list[Panel]]:
    """A panel as wide as the picture alone, the others between two of them together."""
    blocks: list[list[Panel]] = []
    for panel in panels:
        if blocks and not isinstance(panel, DotPanel) and not isinstance(blocks[-1][0], DotPanel):
            blocks[-1].append(panel)
        else:
            blocks.append([panel])
    return blocks


def _inches(block: Sequence[Panel], columns: int) -> float:
    """Its height."""
    if isinstance(block[0], DotPanel):
        rows = sum(1 + len(dots) for dots in block[0].groups.values())
        return rows * _ROW_INCHES + _AROUND_ROWS_INCHES
    return -(-len(block) // columns) * _PANEL_INCHES[1]


def _draw_block(part: Any, block: Sequence[Panel], columns: int, looks: dict[str, "_Look"]) -> None:
    """Legends are outside, where they cover nothing: one above all panels where one names every series, else beside
    the first panel of each set of series. Rows of dots are named where they are."""
    if isinstance(block[0], DotPanel):
        _draw_panel(part.add_subplot(), block[0], looks)
        return
    drawn = []
    for number, panel in enumerate(block):
        axes = part.add_subplot(-(-len(block) // columns), columns, number + 1)
        _draw_panel(axes, panel, looks)
        drawn.append((axes, [series.label for series in _series(panel)]))
    most, names = max(drawn, key=lambda item: len(item[1]))
    if len(names) > 1 and all(set(own) <= set(names) for _, own in drawn):
        handles, shown = most.get_legend_handles_labels()
        part.legend(handles, shown, loc="outside upper center", ncols=min(len(shown), 2 * columns))
        return
    explained: list[list[str]] = []
    for axes, names in drawn:
        if len(names) > 1 and names not in explained:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
            explained.append(names)


@dataclass(frozen=True)
class _Look:
    """Of all that has one label. second: dashed, hollow or hatched."""

    colour: str
    second: bool


def _series(panel: Panel) -> Sequence[Line | Dots | Bars]:
    if isinstance(panel, DotPanel):
        return [dots for rows in panel.groups.values() for dots in rows]
    return panel.lines if isinstance(panel, LinePanel) else panel.bars


def _require_lengths(panel: Panel) -> None:
    for series in _series(panel):
        if isinstance(series, Dots):
            continue
        values = series.y if isinstance(series, Line) else series.values
        along = series.x if isinstance(series, Line) else panel.groups if isinstance(panel, BarPanel) else ()
        if (series.low is None) != (series.high is None):
            raise ValueError(f"{panel.title!r}: {series.label!r} has one of low and high; give both or neither")
        lengths = [len(part) for part in (along, values, series.low, series.high) if part is not None]
        if len(set(lengths)) > 1:
            raise ValueError(f"{panel.title!r}: {series.label!r} has lengths {lengths} of what belongs together")


def _draw_panel(axes: Any, panel: Panel, looks: dict[str, _Look]) -> None:
    axes.set_title(panel.title)
    if isinstance(panel, DotPanel):
        _draw_dots(axes, panel, looks)
        return
    axes.set_ylabel(panel.y_label)
    if panel.reference is not None:
        axes.axhline(panel.reference, color="#555555", linestyle="--", linewidth=1)
    if isinstance(panel, LinePanel):
        _draw_lines(axes, panel, looks)
    else:
        _draw_bars(axes, panel, looks)


def _draw_lines(axes: Any, panel: LinePanel, looks: dict[str, _Look]) -> None:
    ticks = sorted({x for line in panel.lines for x in line.x})
    few = len(ticks) <= 8
    for line in panel.lines:
        look = looks[line.label]
        axes.plot(
            line.x, line.y, color=look.colour, linestyle="--" if look.second else "-", label=line.label,
            marker="o" if few else "", markersize=4, linewidth=2.5 if line.broad else 1.4,
        )  # fmt: skip
        if line.low is not None:
            axes.fill_between(line.x, line.low, line.high, color=look.colour, alpha=0.2, linewidth=0)
    axes.set_xlabel(panel.x_label)
    if panel.logarithmic_x:
        axes.set_xscale("log")
        if few:
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.set_xticks([], minor=True)
    if axes.get_xscale() == "linear":
        axes.locator_params(axis="x", nbins=6)  # numbers of six digits would run into one another
    if panel.logarithmic_y:
        _scale_logarithmically(axes, panel)


def _scale_logarithmically(axes: Any, panel: LinePanel) -> None:
    """The y axis, with tick labels that are few and not written over one another."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    if panel.linear_below is not None:
        axes.set_yscale("symlog", linthresh=panel.linear_below, linscale=0.5)
        low, high = (math.floor(math.log10(edge)) for edge in (panel.linear_below, axes.get_ylim()[1]))
        powers = range(low, high + 1)
        axes.set_yticks([0, *(10.0**power for power in powers)], ["0", *(f"$10^{{{power}}}$" for power in powers)])
        axes.set_ylabel(f"{panel.y_label} (linear below $10^{{{low}}}$)")
        axes.set_ylim(bottom=-0.1 * panel.linear_below)
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 10**_FEW_DECADES:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(LogLocator(subs=()))


def _draw_dots(axes: Any, panel: DotPanel, looks: dict[str, _Look]) -> None:
    """Each value lies a little below its mean, so that neither covers the other."""
    for reference in panel.references:
        colour = looks[reference.label].colour
        axes.axvline(reference.mean, color=colour, linewidth=1)
        if not math.isnan(reference.low):
            axes.axvspan(reference.low, reference.high, color=colour, alpha=0.12, linewidth=0)
    names: list[str] = []
    headings: list[int] = []
    for group, rows in panel.groups.items():
        headings.append(len(names))
        names.append(group)
        for dots in rows:
            place, look = len(names), looks[dots.label]
            names.append(dots.label)
            axes.scatter(
                dots.values, [place + 0.25] * len(dots.values), s=20, color=look.colour, alpha=0.5, linewidths=0
            )
            axes.hlines(place - 0.12, dots.low, dots.high, color=look.colour, linewidth=2)
            face = "white" if look.second else look.colour
            axes.plot(dots.mean, place - 0.12, "o", markersize=6.5, color=look.colour, markerfacecolor=face)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    for heading in headings:
        axes.get_yticklabels()[heading].set_fontweight("bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(panel.x_label)


def _draw_bars(axes: Any, panel: BarPanel, looks: dict[str, _Look]) -> None:
    width = _BARS_SHARE / (1 if panel.stacked else max(len(panel.bars), 1))
    places = range(len(panel.groups))
    base = [0.0] * len(panel.groups)
    for number, bars in enumerate(panel.bars):
        offset = 0.0 if panel.stacked else (number - (len(panel.bars) - 1) / 2) * width
        left = [place + offset for place in places]
        whiskers = None
        if bars.low is not None and bars.high is not None and not panel.stacked:
            below = [value - low for value, low in zip(bars.values, bars.low, strict=True)]
            above = [high - value for value, high in zip(bars.values, bars.high, strict=True)]
            whiskers = [below, above]
        axes.bar(
            left, bars.values, width, bottom=base if panel.stacked else None, color=looks[bars.label].colour,
            hatch="//" if looks[bars.label].second else None, label=bars.label, yerr=whiskers,
            error_kw={"linewidth": 1, "capsize": 2},
        )  # fmt: skip
        if panel.stacked:
            base = [low + value for low, value in zip(base, bars.values, strict=True)]
    letters = sum(map(len, panel.groups))
    rotation = 0 if letters <= _LETTERS else 30 if letters <= 2 * _LETTERS else 90
    alignment = "right" if rotation == 30 else "center"
    axes.set_xticks(list(places), panel.groups, rotation=rotation, ha=alignment)
