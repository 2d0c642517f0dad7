"""The tables of `python -m benchmarks speed`."""

from benchmarks.speed.figures import SAMPLING_SHARE, EngineRow, Spread
from benchmarks.speed.job import PHASES
from benchmarks.speed.measure import Figures
from qarl.report.tables import PlainTable


def tables(figures: Figures) -> list[PlainTable]:
    """Decoding, prefill, steps."""
    return [_engine(figures, "decode"), _engine(figures, "prefill"), _steps(figures)]


def _engine(figures: Figures, what: str) -> PlainTable:
    """A row per scheme and context, a column per batch."""
    batches = [f"batch {batch}" for batch in figures.options.batches]
    title = f"{what}, tokens/s: over bf16's (smallest to largest of the rounds)"
    caption = ""
    if what == "decode":
        caption = f"{figures.model}, {figures.parameters / 1e6:,.1f} million parameters"
        caption += "".join(f"\n{name} left out: {reason}" for name, reason in figures.skipped.items())
    shown = PlainTable("scheme", "context", *batches, figures=("context", *batches), title=title, caption=caption)
    for scheme, context in dict.fromkeys((row.scheme, row.context) for row in figures.engine):
        rows = [row for row in figures.engine if (row.scheme, row.context) == (scheme, context)]
        shown.add_row(scheme, str(context), *(_engine_cell(row, what) for row in rows))
    return shown


def _engine_cell(row: EngineRow, what: str) -> str:
    rate, over = (getattr(row, f"{what}{part}") for part in ("", "_over_bf16"))
    ratio = "" if row.scheme == "bf16" else f" {_ratio(over)}"
    return f"{rate.median:,.0f}{ratio}"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} × ({spread.low:.2f}-{spread.high:.2f})"


def _steps(figures: Figures) -> PlainTable:
    share = f"{SAMPLING_SHARE:.0%}"
    columns = (
        "s/step", "of bf16", "split", "sampling", "engine's gain", "kept", f"kept at {share}", "over plain",
        f"over plain at {share}",
    )  # fmt: skip
    caption = (
        f"split: percent of the step in {', '.join(PHASES)}\nkept: the step's speed-up over what its sampling alone "
        f"would give; at {share}: were sampling {share} of the bf16 step, and of the plain step"
    )
    shown = PlainTable("learner", *columns, figures=columns, title="training step", caption=caption)
    for row in figures.steps:
        whole = sum(row.phases.values())
        split = "/".join(f"{100 * row.phases[phase] / whole:.0f}" for phase in PHASES)
        shown.add_row(
            row.scheme if row.kind == "bf16" else f"{row.scheme} {row.kind}", f"{row.seconds.median:.2f}",
            _ratio(row.of_bf16), split, f"{row.sampling:.0%}", f"{row.sampling_speedup.median:.2f} ×",
            _percent(row.kept, ".0%"), _percent(row.kept_at_share, ".0%"), _percent(row.over_plain, "+.1%"),
            _percent(row.over_plain_at_share, "+.1%"),
        )  # fmt: skip
    return shown


def _percent(spread: Spread | None, written: str) -> str:
    return "-" if spread is None else f"{spread.median:{written}}"
