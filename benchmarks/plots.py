"""Figures of benchmarks: lines with bands, each figure written as SVG and as PNG.

A label has one colour in all panels of a figure. The first eight labels get colours that
colour-blind readers can tell apart (Okabe and Ito's, with the yellow darkened); the next eight are
dashed. The SVG depends only on the data: it has no dates and no random names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError

SUFFIXES = (".svg", ".png")
_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8C8C00",
    "#000000",
)
_PANEL_INCHES = (5.2, 3.4)
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
    "svg.fonttype": "none",  # write text as text, not as paths
    "svg.hashsalt": "qarl",
}


@dataclass(frozen=True)
class Line:
    """Curve of y over x, both of the same length; NaN is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    """Lower edge of the band around the curve; set together with `high` or not at all."""
    high: Sequence[float] | None = None
    """Upper edge of the band."""


@dataclass(frozen=True)
class LinePanel:
    """One panel of a figure."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    reference: float | None = None
    """Height of a dashed horizontal line, such as 1.0 for ratios."""
    logarithmic_x: bool = False
    """Whether the x axis is logarithmic.

    If it has few values, such as batch sizes, each of them gets a tick.
    """


def plot_stem(option: str, file: str) -> Path:
    """Return the path without its suffix for `NAME`, `NAME.svg` or `NAME.png`.

    The name was passed to `option`. Raises `ConfigError` if either file cannot be written; call it
    before the work, so that the error does not come after it.
    """
    path = Path(file)
    if path.suffix in SUFFIXES:
        path = path.with_suffix("")
    folders = [f"{path}{suffix}" for suffix in SUFFIXES if Path(f"{path}{suffix}").is_dir()]
    if folders:
        raise ConfigError(f"{option} {file}: {folders[0]!r} is a folder; name a file elsewhere")
    if not path.name or not path.parent.is_dir():
        raise ConfigError(
            f"{option} {file}: {str(path.parent)!r} is not a folder; name a file in one that"
            " exists, such as plot.svg"
        )
    return path


def draw(
    panels: Sequence[LinePanel],
    stem: Path,
    title: str = "",
    columns: int = 2,
) -> list[Path]:
    """Write `stem`.svg and `stem`.png (150 dots an inch), panels row by row; return both paths.

    Raises `ValueError` if lengths of sequences that belong together differ, or if there is nothing
    to draw.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("no panels to draw")
    for panel in panels:
        _require_lengths(panel)
    columns = min(columns, len(panels))
    labels = dict.fromkeys(line.label for panel in panels for line in panel.lines)
    looks = {
        label: _Look(_COLOURS[i % len(_COLOURS)], i >= len(_COLOURS))
        for i, label in enumerate(labels)
    }
    rows = -(-len(panels) // columns)
    with rc_context(_STYLE):
        figure = Figure((columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), layout="constrained")
        if title:
            figure.suptitle(title)
        _draw_panels(figure, panels, rows, columns, looks)
        files = [Path(f"{stem}{suffix}") for suffix in SUFFIXES]
        figure.savefig(files[0], metadata={"Date": None, "Creator": None})
        figure.savefig(files[1], dpi=150, metadata={"Software": None})
    return files


def _draw_panels(
    figure: Any,
    panels: Sequence[LinePanel],
    rows: int,
    columns: int,
    looks: dict[str, "_Look"],
) -> None:
    """Draw the panels, with legends outside, where they cover nothing.

    If one legend names every series, it stands above all panels. Otherwise a legend stands next to
    the first panel of each set of series.
    """
    drawn = []
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        _draw_panel(axes, panel, looks)
        drawn.append((axes, [line.label for line in panel.lines]))
    fullest, names = max(drawn, key=lambda item: len(item[1]))
    covers_all = all(set(own) <= set(names) for _, own in drawn)
    if len(names) > 1 and covers_all:
        handles, shown = fullest.get_legend_handles_labels()
        figure.legend(
            handles,
            shown,
            loc="outside upper center",
            ncols=min(len(shown), 2 * columns),
        )
        return
    explained: list[list[str]] = []
    for axes, names in drawn:
        if len(names) > 1 and names not in explained:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
            explained.append(names)


@dataclass(frozen=True)
class _Look:
    """Style of all lines with one label."""

    colour: str
    second: bool
    """Whether the label is one of the second eight, which are dashed."""


def _require_lengths(panel: LinePanel) -> None:
    for line in panel.lines:
        if (line.low is None) != (line.high is None):
            raise ValueError(
                f"{panel.title!r}: {line.label!r} has one of low and high; give both or neither"
            )
        parts = (line.x, line.y, line.low, line.high)
        lengths = [len(part) for part in parts if part is not None]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"{panel.title!r}: {line.label!r} has lengths {lengths} of what belongs together"
            )


def _draw_panel(axes: Any, panel: LinePanel, looks: dict[str, _Look]) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.y_label)
    if panel.reference is not None:
        axes.axhline(panel.reference, color="#555555", linestyle="--", linewidth=1)
    _draw_lines(axes, panel, looks)


def _draw_lines(axes: Any, panel: LinePanel, looks: dict[str, _Look]) -> None:
    ticks = sorted({x for line in panel.lines for x in line.x})
    few = len(ticks) <= 8
    for line in panel.lines:
        look = looks[line.label]
        axes.plot(
            line.x,
            line.y,
            color=look.colour,
            linestyle="--" if look.second else "-",
            label=line.label,
            marker="o" if few else "",
            markersize=4,
            linewidth=1.4,
        )
        if line.low is not None:
            axes.fill_between(
                line.x, line.low, line.high, color=look.colour, alpha=0.2, linewidth=0
            )
    axes.set_xlabel(panel.x_label)
    if panel.logarithmic_x:
        axes.set_xscale("log")
        if few:
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.set_xticks([], minor=True)
    if axes.get_xscale() == "linear":
        # with more ticks, numbers of six digits would overlap
        axes.locator_params(axis="x", nbins=6)
