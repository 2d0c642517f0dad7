"""The figures of `qarl bench speed`, and its prediction, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from qarl.bench.speed.figures import EngineRow, Spread, StepRow
from qarl.bench.speed.job import PHASES
from qarl.bench.speed.measure import Figures
from qarl.bench.speed.plan import Plan, PlanRow
from qarl.report.plots import BarPanel, Bars, Line, LinePanel, Panel, draw


def draw_figures(figures: Figures, stem: Path) -> list[Path]:
    """Decoding and prefill over bf16's by batch, one panel a context; a step's split and its seconds over bf16's."""
    panels: list[Panel] = []
    for what, title in (("decode", "decoding"), ("prefill", "prefill")):
        for context in figures.options.contexts:
            rows = [row for row in figures.engine if row.context == context and row.scheme != "bf16"]
            lines = [_line(rows, scheme, what) for scheme in dict.fromkeys(row.scheme for row in rows)]
            panels.append(
                LinePanel(
                    f"{title}, context {context}", "sequences at once", "tokens/s over bf16's", lines, reference=1.0,
                    logarithmic_x=True,
                )
            )  # fmt: skip
    return draw([*panels, *_step_panels(figures.steps)], stem, f"qarl bench speed, {figures.model}")


def draw_plan(plan: Plan, stem: Path) -> list[Path]:
    """A predicted step's split and its seconds over bf16's."""
    title = f"predicted, not run: {plan.options.model} on {plan.cluster.count} × {plan.cluster.name}"
    return draw(_step_panels(plan.rows), stem, title)


def _line(rows: list[EngineRow], scheme: str, what: str) -> Line:
    own = sorted((row for row in rows if row.scheme == scheme), key=lambda row: row.batch)
    spreads = [getattr(row, f"{what}_over_bf16") for row in own]
    return Line(
        scheme,
        [row.batch for row in own],
        [spread.median for spread in spreads],
        low=[spread.low for spread in spreads],
        high=[spread.high for spread in spreads],
    )


def _step_panels(rows: Sequence[StepRow | PlanRow]) -> list[Panel]:
    names = [row.scheme if row.kind == "bf16" else f"{row.scheme} {row.kind}" for row in rows]
    shown = [phase for phase in PHASES if any(row.phases[phase] for row in rows)]
    split = [Bars(phase, [row.phases[phase] for row in rows]) for phase in shown]
    schemes = list(dict.fromkeys(row.scheme for row in rows if row.kind != "bf16"))
    over = [_over_bf16([row for row in rows if row.kind == kind], kind) for kind in ("plain", "qarl") if schemes]
    return [
        BarPanel("training step", "seconds", names, split, stacked=True),
        *([BarPanel("training step", "seconds over bf16's", schemes, over, reference=1.0)] if schemes else []),
    ]


def _over_bf16(rows: Sequence[StepRow | PlanRow], kind: str) -> Bars:
    """Of one kind, a bar a scheme."""
    spreads = [row.of_bf16 if isinstance(row, StepRow) else Spread.of([row.of_bf16]) for row in rows]
    return Bars(kind, [s.median for s in spreads], [s.low for s in spreads], [s.high for s in spreads])
