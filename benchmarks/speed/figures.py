"""From what every process answered to the benchmark's figures: medians over rounds, ratios within a round."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.speed.job import PHASES, Answer

SAMPLING_SHARE = 0.7
"""Of a step: what figures "at share" suppose."""

Rounds = Mapping[str, Sequence[Answer]]
"""Scheme → what its process answered in each round; bf16 is among them."""


@dataclass(frozen=True)
class Spread:
    """Over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Median, smallest and largest."""
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class EngineRow:
    """One scheme's engine in one cell. Tokens a second of decoding and of reading prompts, and as multiples of bf16's
    in the same round."""

    scheme: str
    context: int
    batch: int
    decode: Spread
    decode_over_bf16: Spread
    prefill: Spread
    prefill_over_bf16: Spread


@dataclass(frozen=True)
class StepRow:
    """A training step of one kind (`benchmarks.speed.job.KINDS`).

    seconds: of the step; phases: median seconds of each. of_bf16: the step's seconds over bf16's. sampling: its share.
    sampling_speedup: bf16's seconds of sampling over this scheme's. kept: the step's speed-up over what the sampling
    alone would give it. over_plain: QaRL's step over the plain one's, minus 1. kept_at_share, over_plain_at_share: the
    same where sampling had `SAMPLING_SHARE` of bf16's step, and of the plain step, and all else took as long as it did.
    None where the kind has no such figure.
    """

    scheme: str
    kind: str
    seconds: Spread
    phases: dict[str, float]
    of_bf16: Spread
    sampling: float
    sampling_speedup: Spread
    kept: Spread | None
    kept_at_share: Spread | None
    over_plain: Spread | None
    over_plain_at_share: Spread | None


def engine_rows(rounds: Rounds) -> list[EngineRow]:
    """By scheme, context and batch."""
    rows = []
    for scheme, answers in rounds.items():
        for number, cell in enumerate(answers[0].cells):
            cells = [answer.cells[number] for answer in answers]
            pairs = list(zip(cells, (answer.cells[number] for answer in rounds["bf16"]), strict=True))
            row = EngineRow(
                scheme=scheme,
                context=cell.context,
                batch=cell.batch,
                decode=Spread.of([cell.batch / each.decode_seconds for each in cells]),
                decode_over_bf16=Spread.of([bf16.decode_seconds / each.decode_seconds for each, bf16 in pairs]),
                prefill=Spread.of([cell.batch * cell.context / each.prefill_seconds for each in cells]),
                prefill_over_bf16=Spread.of([bf16.prefill_seconds / each.prefill_seconds for each, bf16 in pairs]),
            )
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Step:
    """One round's step: of every phase the quickest."""

    sample: float
    rest: float
    """All phases but sampling."""

    @property
    def seconds(self) -> float:
        return self.sample + self.rest


def step_rows(rounds: Rounds) -> list[StepRow]:
    """By scheme and kind. The engine samples alike for a plain learner and for QaRL, so both have the quicker of its
    times."""
    bf16 = [_step(answer, "bf16") for answer in rounds["bf16"]]
    rows = []
    for scheme, answers in rounds.items():
        for kind in answers[0].steps:
            steps = [_step(answer, kind) for answer in answers]
            plain = [_step(answer, "plain") for answer in answers] if kind == "qarl" else None
            rows.append(_row(scheme, kind, steps, bf16, plain, answers))
    return rows


def _row(
    scheme: str, kind: str, steps: list[_Step], bf16: list[_Step], plain: list[_Step] | None, answers: Sequence[Answer]
) -> StepRow:
    pairs = list(zip(steps, bf16, strict=True))
    low_bit = kind != "bf16"
    against_plain = list(zip(steps, plain, strict=True)) if plain else []
    return StepRow(
        scheme=scheme,
        kind=kind,
        seconds=Spread.of([step.seconds for step in steps]),
        phases={p: statistics.median(_phases(answer, kind)[p] for answer in answers) for p in PHASES},
        of_bf16=Spread.of([step.seconds / other.seconds for step, other in pairs]),
        sampling=statistics.median(step.sample / step.seconds for step in steps),
        sampling_speedup=Spread.of([other.sample / step.sample for step, other in pairs]),
        kept=Spread.of([kept(step.sample, step.rest, other.rest) for step, other in pairs]) if low_bit else None,
        kept_at_share=Spread.of(
            [
                kept(SAMPLING_SHARE * step.sample / other.sample, (1 - SAMPLING_SHARE) * step.rest / other.rest,
                     1 - SAMPLING_SHARE)
                for step, other in pairs
            ]
        ) if low_bit else None,
        over_plain=Spread.of([step.seconds / other.seconds - 1 for step, other in against_plain]) if plain else None,
        over_plain_at_share=Spread.of(
            [(1 - SAMPLING_SHARE) * (step.rest / other.rest - 1) for step, other in against_plain]
        ) if plain else None,
    )  # fmt: skip


def kept(sample: float, rest: float, rest_bf16: float) -> float:
    """The share of the engine's gain that a step keeps: its speed-up over that of a step whose sampling alone is
    quicker, (b + r₀) / (s + r) over (b + r₀) / (s + r₀), with bf16's sampling b, which cancels, and all else r₀.

    sample, rest: seconds of the low-bit step, sampling and all else. rest_bf16: all else of bf16's.
    """
    return (sample + rest_bf16) / (sample + rest)


def _step(answer: Answer, kind: str) -> _Step:
    phases = _phases(answer, kind)
    return _Step(phases["sample"], sum(phases.values()) - phases["sample"])


def _phases(answer: Answer, kind: str) -> dict[str, float]:
    """Of each phase the quickest of the steps, the least disturbed; sampling over all kinds, for one engine samples."""
    phases = {phase: min(step[phase] for step in answer.steps[kind]) for phase in PHASES}
    return phases | {"sample": min(step["sample"] for steps in answer.steps.values() for step in steps)}
