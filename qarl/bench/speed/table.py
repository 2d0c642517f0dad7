"""The tables of `qarl bench speed`."""

from rich.text import Text

from qarl.bench.speed.figures import KEPT_AT_LEAST, OVER_PLAIN_AT_MOST, SAMPLING_SHARE, EngineRow, Spread
from qarl.bench.speed.job import PHASES
from qarl.bench.speed.measure import Figures
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
        f"would give, target at least {KEPT_AT_LEAST:.0%}; over plain: target at most {OVER_PLAIN_AT_MOST:.0%}; at "
        f"{share}: were sampling {share} of the bf16 step, and of the plain step"
    )
    shown = PlainTable("learner", *columns, figures=columns, title="training step", caption=caption)
    for row in figures.steps:
        whole = sum(row.phases.values())
        split = "/".join(f"{100 * row.phases[phase] / whole:.0f}" for phase in PHASES)
        shown.add_row(
            row.scheme if row.kind == "bf16" else f"{row.scheme} {row.kind}", f"{row.seconds.median:.2f}",
            _ratio(row.of_bf16), split, f"{row.sampling:.0%}", f"{row.sampling_speedup.median:.2f} ×",
            _judged(row.kept, True), _judged(row.kept_at_share, True), _judged(row.over_plain, False),
            _judged(row.over_plain_at_share, False),
        )  # fmt: skip
    return shown


def _judged(spread: Spread | None, at_least: bool) -> Text:
    """Red where a target is missed."""
    if spread is None:
        return Text("-")
    reached = spread.median >= KEPT_AT_LEAST if at_least else spread.median <= OVER_PLAIN_AT_MOST
    text = f"{spread.median:.0%}" if at_least else f"{spread.median:+.1%}"
    return Text(text, style="" if reached else "red")
