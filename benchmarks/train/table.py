"""Results of `python -m benchmarks train`: a table, and a figure of accuracy over time."""

from pathlib import Path
from statistics import median

from rich.text import Text

from benchmarks.plots import Line, LinePanel, draw
from benchmarks.train.measure import Reached, Training, summary
from qarl.report.tables import PlainTable

OF_TRL_AT_MOST = 0.5
"""Target: upper bound of the wall time to each accuracy over that of TRL's quickest setting."""


def table(trainings: list[Training], targets: tuple[float, ...]) -> PlainTable:
    """Return a table with a row per trainer and accuracy; ratios that miss their target are red."""
    against = any(training.trainer == "trl" for training in trainings)
    figures = ["start s", "s/step", "CPU s/step", "last", "to", "samples", "s", "CPU s"]
    figures += ["s of TRL", "CPU s of TRL"] if against else []
    seeds = len({training.seed for training in trainings})
    caption = (
        "steps without evaluations; s and CPU s to the first evaluation that reaches the accuracy,"
        " between two evaluations on a straight line; - : not reached by every seed"
        + (
            f"\nof TRL's quickest setting to that accuracy; target at most {OF_TRL_AT_MOST} x"
            if against
            else ""
        )
    )
    title = f"trainings: medians over {seeds} seed{'s' * (seeds > 1)}"
    shown = PlainTable("trainer", *figures, figures=figures, title=title, caption=caption)
    for row in summary(trainings, targets):
        own = [t for t in trainings if (t.trainer, t.setting) == (row.trainer, row.setting)]
        ratios = _ratios(row) if against else ()
        shown.add_row(*_run_cells(own), *_cells(row), *ratios)
    return shown


def _run_cells(own: list[Training]) -> list[str]:
    last = [training.points[-1] for training in own]
    return [
        own[0].label,
        f"{median(training.startup for training in own):.1f}",
        f"{median(point.seconds / point.step for point in last):.2f}",
        f"{median(point.cpu_seconds / point.step for point in last):.2f}",
        f"{median(point.accuracy for point in last):.1%}",
    ]


def _cells(row: Reached) -> list[str]:
    return [
        f"{row.accuracy:.0%}",
        "-" if row.samples is None else f"{row.samples:,.0f}",
        "-" if row.seconds is None else f"{row.seconds:.1f}",
        "-" if row.cpu_seconds is None else f"{row.cpu_seconds:.1f}",
    ]


def _ratios(row: Reached) -> list[str | Text]:
    cells: list[str | Text] = []
    for ratio in (row.of_trl, row.cpu_of_trl):
        missed = row.trainer == "qarl" and ratio is not None and ratio > OF_TRL_AT_MOST
        cells.append(
            Text(
                "-" if ratio is None else f"{ratio:.2f} x",
                style="red" if missed else "",
            )
        )
    return cells


def plot(trainings: list[Training], stem: Path) -> list[Path]:
    """Plot held-out accuracy over seconds, over CPU seconds and over samples.

    Each trainer has one line, that of the first seed.
    """
    shown = [training for training in trainings if training.seed == trainings[0].seed]

    def panel(name: str, label: str) -> LinePanel:
        lines = [
            Line(
                t.label,
                [getattr(p, name) for p in t.points],
                [100 * p.accuracy for p in t.points],
            )
            for t in shown
        ]
        return LinePanel(f"by {label}", label, "held-out accuracy, %", lines)

    panels = [
        panel("seconds", "seconds"),
        panel("cpu_seconds", "CPU seconds"),
        panel("samples", "completions"),
    ]
    return draw(panels, stem, columns=3)
