"""The tables of `qarl bench speed`."""

from collections.abc import Iterator

from qarl.bench.figures import EngineRow, MemoryRow, SpeedReport, Spread, StepRow
from qarl.bench.job import PHASES
from qarl.configs.schemes import UNQUANTIZED
from qarl.report.tables import PlainTable

LEARNER_PHASES = PHASES[1:]
"""All phases except sampling."""


def tables(report: SpeedReport) -> list[PlainTable]:
    """Return the tables of decoding, prefill, training step, the step's parts, and memory."""
    return [
        _engine_table(report, "decode"),
        _engine_table(report, "prefill"),
        _step_table(report),
        _parts_table(report),
        _memory_table(report),
    ]


def learner_name(row: StepRow | MemoryRow) -> str:
    """Return the name of a row's learner in tables and pictures: "bf16", "w4a16 plain", "w4a16
    qarl".
    """
    return UNQUANTIZED if row.kind == UNQUANTIZED else f"{row.scheme} {row.kind}"


def describe_rounds(report: SpeedReport) -> str:
    """Return in words how far the ratios of single rounds are from the medians."""
    if report.options.rounds == 1:
        return "one round; the default of three shows how far rounds differ"
    widest = max(spread.relative for spread in _ratios(report))
    return (
        f"medians of {report.options.rounds} rounds; ratios of single rounds differ from them by up"
        f" to {widest:.0%}"
    )


def _ratios(report: SpeedReport) -> Iterator[Spread]:
    for row in report.engine:
        yield from (row.decode_over_bf16, row.prefill_over_bf16)
    for row in report.steps:
        yield row.of_bf16


def _engine_table(report: SpeedReport, what: str) -> PlainTable:
    """Return the rates of decoding or prefill: a row for each scheme and context, a column for each
    batch.
    """
    batches = [f"batch {batch}" for batch in report.options.batches]
    table = PlainTable(
        "scheme",
        "context",
        *batches,
        figures=("context", *batches),
        title=f"{what}, tokens a second (times as fast as bf16)",
        caption=_describe_model(report) if what == "decode" else "",
    )
    for scheme, context in dict.fromkeys((row.scheme, row.context) for row in report.engine):
        rows = [row for row in report.engine if (row.scheme, row.context) == (scheme, context)]
        table.add_row(scheme, str(context), *(_engine_cell(row, what) for row in rows))
    return table


def _describe_model(report: SpeedReport) -> str:
    parameters = (
        f"{report.model}, {report.parameters / 1e6:,.1f} million parameters, {report.options.dtype}"
    )
    return f"{parameters}\n{describe_rounds(report)}"


def _engine_cell(row: EngineRow, what: str) -> str:
    if what == "decode":
        rate = row.decode
        over_bf16 = row.decode_over_bf16
    else:
        rate = row.prefill
        over_bf16 = row.prefill_over_bf16
    ratio = "" if row.scheme == UNQUANTIZED else f" ({over_bf16.median:.2f})"
    return f"{rate.median:,.0f}{ratio}"


def _step_table(report: SpeedReport) -> PlainTable:
    columns = (
        "s/step",
        "of bf16",
        "sampling",
        "rest of bf16",
        "gain kept",
        "over plain",
    )
    caption = (
        "of bf16: the step's seconds over bf16's; rest of bf16: the same without sampling\n"
        "gain kept: the step's speed-up over what its sampling alone would give\n"
        "over plain: seconds more than with a 16-bit learner under the same sampler"
    )
    table = PlainTable("learner", *columns, figures=columns, title="training step", caption=caption)
    for row in report.steps:
        table.add_row(
            learner_name(row),
            seconds_text(row.seconds.median),
            f"{row.of_bf16.median:.2f}",
            f"{row.sampling:.0%}",
            f"{row.rest_of_bf16.median:.2f}",
            _percent(row.kept, ".0%"),
            _percent(row.over_plain, "+.1%"),
        )
    return table


def _parts_table(report: SpeedReport) -> PlainTable:
    caption = (
        "old: log-probs before the update; materialize: making a weight version, of bf16 and QaRL"
        " also writing it into the engine; rest: making the batch"
    )
    table = PlainTable(
        "learner",
        *LEARNER_PHASES,
        figures=LEARNER_PHASES,
        title="seconds of a step besides sampling",
        caption=caption,
    )
    for row in report.steps:
        table.add_row(
            learner_name(row),
            *(seconds_text(row.phases[phase]) for phase in LEARNER_PHASES),
        )
    return table


def _memory_table(report: SpeedReport) -> PlainTable:
    columns = ("peak, MiB", "of bf16")
    table = PlainTable(
        "learner",
        *columns,
        figures=columns,
        title="memory of engine and learner",
        caption=(
            "the peak of the process; libraries and the key/value cache, alike in all, are in it"
        ),
    )
    for row in report.memory:
        table.add_row(
            learner_name(row),
            f"{row.peak_bytes.median / 2**20:,.0f}",
            f"{row.over_bf16.median:.2f}",
        )
    return table


def seconds_text(seconds: float) -> str:
    """Return seconds with three decimals below one, and two above."""
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"


def _percent(spread: Spread | None, format_spec: str) -> str:
    return "-" if spread is None else f"{spread.median:{format_spec}}"
