"""Table of `python -m benchmarks learner`, with the targets."""

from rich.text import Text

from benchmarks.learner.measure import PHASES, Row
from qarl.report.tables import PlainTable

MATERIALIZE_AT_MOST = 0.03
MEMORY_AT_MOST = 0.40
SPEED_AT_LEAST = 1.5
"""Targets: fraction of the step; fraction of TRL's smallest step memory; multiple of TRL's speed.

Speed is compared with TRL's highest number of tokens per second.
"""


def table(rows: list[Row], dtype: str) -> PlainTable:
    """Return a table with one row per model and trainer; values that miss their target are red."""
    against = any(row.trainer == "trl" for row in rows)
    caption = (
        f"materialize: target at most {MATERIALIZE_AT_MOST:.0%} of the step; split: percent of the"
        f" step in {', '.join((*PHASES, 'rest'))}"
        + (
            "\nagainst TRL's best setting of each column: memory target at most"
            f" {MEMORY_AT_MOST:.0%}, speed at least {SPEED_AT_LEAST} x"
            if against
            else ""
        )
    )
    columns = [
        "s/step",
        "CPU s",
        "of bf16",
        "tok/s",
        "split",
        "materialize",
        "step MiB",
        "all MiB",
    ]
    figures = (*columns, *(("speed of TRL", "step memory of TRL") if against else ()))
    shown = PlainTable(
        "model",
        "trainer",
        *figures,
        figures=figures,
        title=f"learner step, {dtype}",
        caption=caption,
    )
    for row in rows:
        shown.add_row(*_cells(row), *(_trl_cells(row, rows) if against else ()))
    return shown


def _cells(row: Row) -> list[str | Text]:
    share = row.materialize_share
    split = "/".join(f"{100 * seconds / row.seconds:.0f}" for seconds in row.phases.values()) or "-"
    return [
        row.model,
        f"{row.trainer} {row.setting}",
        f"{row.seconds:.3f}",
        f"{row.cpu_seconds:.3f}",
        f"{row.against_bf16:.2f} x",
        f"{row.tokens_per_second:,.0f}",
        split,
        "-" if share is None else _judged(share <= MATERIALIZE_AT_MOST, f"{share:.1%}"),
        f"{row.step_bytes / 2**20:,.0f}",
        f"{row.total_bytes / 2**20:,.0f}",
    ]


def _trl_cells(
    row: Row,
    rows: list[Row],
) -> tuple[str | Text, str | Text]:
    """Return tokens per second over TRL's quickest, and step memory over TRL's smallest."""
    trl = [
        other.step_bytes for other in rows if other.trainer == "trl" and other.model == row.model
    ]
    assert row.against_trl is not None
    speed = 1 / row.against_trl
    memory = row.step_bytes / min(trl)
    if row.trainer == "trl":
        return f"{speed:.2f} x", f"{memory:.0%}"
    return _judged(speed >= SPEED_AT_LEAST, f"{speed:.2f} x"), _judged(
        memory <= MEMORY_AT_MOST, f"{memory:.0%}"
    )


def _judged(reached: bool, text: str) -> Text:
    return Text(text, style="" if reached else "red")
