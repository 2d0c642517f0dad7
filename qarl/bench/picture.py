"""The picture of `qarl bench speed`, as SVG: a function of the report, without dates or random
names.

Decoding and prefill as multiples of bf16's over the batch, the training step by phases, and memory.
Units are pixels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from qarl.bench.figures import EngineRow, SpeedReport, Spread
from qarl.bench.job import PHASES
from qarl.bench.tables import describe_rounds, learner_name, seconds_text
from qarl.configs.errors import ConfigError
from qarl.configs.schemes import UNQUANTIZED
from qarl.page.build import check_output

MARK = "<!-- qarl bench speed -->"
"""Beginning of a picture's file. A file without it is not overwritten."""

_WIDTH = 940
"""Width of the picture."""
_MARGIN = 24
_GAP = 40
"""Space between two plots of a row."""
_PLOT_WIDTH = (_WIDTH - 2 * _MARGIN - _GAP) // 2
_PLOT_HEIGHT = 190
_AXIS = 34
"""Space for a plot's numbers, left of it and below it."""
_ROW = 24
"""Height of a bar with the space around it."""
_NAMES = 140
"""Space left of the bars for learners' names."""
_VALUES = 170
"""Space right of the bars for values."""
_LETTER = 6.6
"""Mean width of a letter of the 12-pixel font."""
_COLOURS = (
    "#0072b2",
    "#c65400",
    "#008763",
    "#a8467f",
    "#8f6b00",
    "#2586c2",
    "#6b6b00",
    "#555555",
)
"""Colours of schemes, those of `qarl report`, which colour-blind readers can distinguish. After
eight schemes they repeat, dashed.
"""
_PHASE_COLOURS = (
    "#0072b2",
    "#7fb9dc",
    "#008763",
    "#c65400",
    "#a8467f",
    "#d9a400",
    "#444444",
    "#bbbbbb",
)
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#16202b}.title{font-size:15px;font-weight:600}"
    ".panel{font-weight:600}.soft{fill:#55606d}.grid{stroke:#e8ebef}"
    ".one{stroke:#55606d;stroke-dasharray:4 3}"
)


def check_picture(file: Path, option: str) -> None:
    """Raise `ConfigError` if the picture cannot be written to `file`, or would overwrite something
    else. option: the option that names the file.
    """
    if file.suffix != ".svg" and not file.is_dir():
        raise ConfigError(
            f"{option} {file}: the picture is drawn as SVG; name a file that ends in .svg"
        )
    check_output(file, option, MARK, "picture of qarl bench speed", "bench-speed.svg")


def speed_picture(report: SpeedReport) -> str:
    """Return the text of the SVG file."""
    parts = [*_heading(report)]
    y = 74
    for panel in (_engine_panels, _step_panel, _memory_panel):
        panel_parts, y = panel(report, y)
        parts += panel_parts
    size = f'width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
    head = (
        f'{MARK}\n<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{_STYLE}</style>'
    )
    return "\n".join(
        [
            head,
            f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


Drawn = tuple[list[str], float]
"""Elements, and the y coordinate below them."""


def _heading(report: SpeedReport) -> Iterator[str]:
    model = (
        f"{report.model}, {report.parameters / 1e6:,.1f} million parameters, {report.options.dtype}"
    )
    yield _text(_MARGIN, 32, f"qarl bench speed: {model}", "title")
    yield _text(_MARGIN, 52, describe_rounds(report), "soft")


def _engine_panels(report: SpeedReport, y: float) -> Drawn:
    """Draw decoding on the left and prefill on the right, a row of panels for each context."""
    schemes = [
        name for name in dict.fromkeys(row.scheme for row in report.engine) if name != UNQUANTIZED
    ]
    if not schemes:
        return [], y
    colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(schemes)}
    dashed = set(schemes[len(_COLOURS) :])
    parts, y = _legend(colours, y)
    for context in report.options.contexts:
        rows = [row for row in report.engine if row.context == context]
        bf16 = [row for row in rows if row.scheme == UNQUANTIZED]
        for number, what in enumerate(("decoding", "prefill")):
            x = _MARGIN + number * (_PLOT_WIDTH + _GAP)
            title = f"prefill of {context} tokens"
            if what == "decoding":
                title = f"decoding after {context} tokens"
            parts.append(_text(x, y + 12, f"{title}, times as fast as bf16", "panel"))
            curves = [
                _Curve(name, colours[name], name in dashed, _ratios(rows, name, what))
                for name in schemes
            ]
            labels = [_batch_label(row, what) for row in bf16]
            parts += _plot(x + _AXIS, y + 24, curves, labels)
        y += _PLOT_HEIGHT + 2 * _AXIS + 16
    return parts, y


@dataclass(frozen=True)
class _Curve:
    """One scheme's curve."""

    name: str
    colour: str
    dashed: bool
    ratios: list[Spread]
    """Multiples of bf16, in the order of batches."""


def _ratios(rows: Sequence[EngineRow], scheme: str, what: str) -> list[Spread]:
    own = [row for row in rows if row.scheme == scheme]
    return [row.decode_over_bf16 if what == "decoding" else row.prefill_over_bf16 for row in own]


def _batch_label(bf16: EngineRow, what: str) -> tuple[str, str]:
    """Return the two lines below a batch: its size, and bf16's tokens a second."""
    rate = bf16.decode if what == "decoding" else bf16.prefill
    return f"batch {bf16.batch}", f"bf16 {rate.median:,.0f}/s"


def _plot(
    x: float, y: float, curves: Sequence[_Curve], labels: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Draw curves over equally spaced batches, with a line from the smallest to the largest round
    at each point. x, y: coordinates of the plot's upper left corner.
    """
    width = _PLOT_WIDTH - _AXIS
    largest = max(1.0, *(ratio.high for curve in curves for ratio in curve.ratios))
    tick = _tick(largest)
    ticks = range(1 + math.ceil(largest / tick))
    top = ticks[-1] * tick

    def height(value: float) -> float:
        return y + _PLOT_HEIGHT * (1 - value / top)

    def centre(number: int) -> float:
        return x + width * (number + 0.5) / len(labels)

    for number in ticks:
        yield _line(x, height(number * tick), x + width, height(number * tick), 'class="grid"')
        yield _text(x - 6, height(number * tick) + 4, f"{number * tick:g}", "soft", "end")
    yield _line(x, height(1), x + width, height(1), 'class="one"')
    for number, lines in enumerate(labels):
        for index, line in enumerate(lines):
            baseline = y + _PLOT_HEIGHT + 16 + 15 * index
            yield _text(centre(number), baseline, line, "soft", "middle")
    for shift, curve in enumerate(curves):
        # An offset per curve, so that points of the same height do not hide each other.
        offset = 5 * (shift - (len(curves) - 1) / 2)
        xs = [centre(number) + offset for number in range(len(labels))]
        yield from _curve(curve, xs, [height(ratio.median) for ratio in curve.ratios])
        stroke = f'stroke="{curve.colour}"'
        for point, ratio in zip(xs, curve.ratios, strict=True):
            yield _line(point, height(ratio.low), point, height(ratio.high), stroke)


def _curve(
    curve: _Curve,
    xs: Sequence[float],
    ys: Sequence[float],
) -> Iterator[str]:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
    yield (
        f'<polyline points="{points}" fill="none" stroke="{curve.colour}"'
        f' stroke-width="1.6"{dashes}/>'
    )
    for x, y, ratio in zip(xs, ys, curve.ratios, strict=True):
        tip = f"{curve.name}: {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
            f' fill="{curve.colour}"><title>{escape(tip)}</title></circle>'
        )


def _tick(largest: float) -> float:
    """Return the distance between ticks: 1, 2, 2.5 or 5 times a power of ten, such that at most six
    of them reach `largest`.
    """
    power = 10 ** math.floor(math.log10(largest / 5))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power * 6 >= largest)


def _step_panel(report: SpeedReport, y: float) -> Drawn:
    """Draw the training step's seconds: a bar for each learner, a part for each phase."""
    options = report.options
    completions = f"{options.prompts * options.samples} completions of {options.tokens} tokens"
    parts = [
        _text(
            _MARGIN,
            y + 12,
            f"training step, seconds: {completions}, {options.updates} updates",
            "panel",
        )
    ]
    legend, y = _legend(dict(zip(PHASES, _PHASE_COLOURS, strict=True)), y + 22)
    parts += legend
    most = max(sum(row.phases.values()) for row in report.steps)
    for row in report.steps:
        seconds = [(phase, row.phases[phase]) for phase in PHASES]
        name = learner_name(row)
        tips = [f"{name}, {phase}: {seconds_text(value)} s" for phase, value in seconds]
        lengths = [value / most for _, value in seconds]
        end = f"{seconds_text(row.seconds.median)} s{_of_bf16(row.scheme, row.of_bf16)}"
        parts += _bar(y, name, lengths, _PHASE_COLOURS, tips, end)
        y += _ROW
    return parts, y + _GAP / 2


def _memory_panel(report: SpeedReport, y: float) -> Drawn:
    """Draw the peak of memory: a bar for each learner."""
    parts = [_text(_MARGIN, y + 12, "memory of engine and learner, the process's peak", "panel")]
    y += 26
    most = max(row.peak_bytes.median for row in report.memory)
    for row in report.memory:
        end = f"{row.peak_bytes.median / 2**20:,.0f} MiB{_of_bf16(row.scheme, row.over_bf16)}"
        name = learner_name(row)
        parts += _bar(y, name, [row.peak_bytes.median / most], _COLOURS, [f"{name}: {end}"], end)
        y += _ROW
    return parts, y + _MARGIN


def _of_bf16(scheme: str, ratio: Spread) -> str:
    return "" if scheme == UNQUANTIZED else f", {ratio.median:.2f} × bf16"


def _bar(
    y: float,
    name: str,
    lengths: Sequence[float],
    colours: Sequence[str],
    tips: Sequence[str],
    end: str,
) -> Iterator[str]:
    """Draw a bar of parts. lengths: lengths of the parts as fractions of the longest bar. tips:
    tooltips of the parts. end: text right of the bar.
    """
    x = _MARGIN + _NAMES
    yield _text(x - 8, y + 14, name, "", "end")
    for length, colour, tip in zip(lengths, colours, tips, strict=False):
        width = length * (_WIDTH - 2 * _MARGIN - _NAMES - _VALUES)
        if width > 0:
            size = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}"'
            yield f'<rect {size} fill="{colour}"><title>{escape(tip)}</title></rect>'
        x += width
    yield _text(x + 8, y + 14, end, "soft")


def _legend(colours: dict[str, str], y: float) -> Drawn:
    """Draw names beside their colours, in as many lines as they need."""
    parts = []
    x = float(_MARGIN)
    for name, colour in colours.items():
        width = 34 + _LETTER * len(name)
        if x + width > _WIDTH - _MARGIN:
            x = _MARGIN
            y += 20
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, y + 10, name))
        x += width
    return parts, y + 26


def _text(
    x: float,
    y: float,
    text: str,
    style: str = "",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


def _line(
    x: float,
    y: float,
    x_end: float,
    y_end: float,
    look: str,
) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x_end:.1f}" y2="{y_end:.1f}" {look}/>'
