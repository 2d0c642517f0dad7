"""From what the processes answered to the report: medians over rounds, of ratios that are taken
within a round.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qarl.bench.job import PHASES, Answer, SpeedOptions
from qarl.configs.schemes import UNQUANTIZED

SAMPLING_SHARE = 0.7
"""Sampling's share of a step, which figures "at share" suppose."""

Rounds = Mapping[str, Sequence[Answer]]
"""Scheme → what its process answered in each round; bf16 is among them."""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest value over rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Return the spread of `values`, of which there is at least one."""
        return Spread(statistics.median(values), min(values), max(values))

    @property
    def relative(self) -> float:
        """Return the largest distance from the median, as a fraction of it."""
        return max(self.high - self.median, self.median - self.low) / self.median


@dataclass(frozen=True)
class EngineRow:
    """One scheme's engine for one context and batch: tokens a second of decoding and of prefill,
    and the same as multiples of bf16's in the same round.
    """

    scheme: str
    context: int
    batch: int
    decode: Spread
    decode_over_bf16: Spread
    prefill: Spread
    prefill_over_bf16: Spread


@dataclass(frozen=True)
class StepRow:
    """A training step of one scheme and kind (`qarl.bench.job.KINDS`).

    seconds: of the step. phases: median seconds of each of `PHASES`. of_bf16: the step's seconds
    over bf16's. rest_of_bf16: the same without sampling. sampling: its fraction of the step.
    sampling_speedup: bf16's seconds of sampling over this scheme's. kept: the step's speed-up over
    what the sampling alone would give it. over_plain: seconds of QaRL's step over the plain one's,
    minus 1. kept_at_share, over_plain_at_share: the same if sampling had `SAMPLING_SHARE` of bf16's
    step, or of the plain step, and all else took as long as it did. None where the kind has no such
    figure.
    """

    scheme: str
    kind: str
    seconds: Spread
    phases: dict[str, float]
    of_bf16: Spread
    rest_of_bf16: Spread
    sampling: float
    sampling_speedup: Spread
    kept: Spread | None
    kept_at_share: Spread | None
    over_plain: Spread | None
    over_plain_at_share: Spread | None


@dataclass(frozen=True)
class MemoryRow:
    """The peak of memory of one scheme's processes whose first learner was of `kind`: bytes, and as
    a multiple of bf16's in the same rounds.
    """

    scheme: str
    kind: str
    peak_bytes: Spread
    over_bf16: Spread


@dataclass(frozen=True)
class SpeedReport:
    """What was measured.

    parameters: of the model. skipped: scheme → why it was left out. rounds: scheme → what its
    processes answered.
    """

    model: str
    parameters: int
    options: SpeedOptions
    skipped: dict[str, str]
    engine: list[EngineRow]
    steps: list[StepRow]
    memory: list[MemoryRow]
    rounds: dict[str, list[Answer]]


def engine_rows(rounds: Rounds) -> list[EngineRow]:
    """Return a row for each scheme, context and batch."""
    rows = []
    for scheme, answers in rounds.items():
        for number, cell in enumerate(answers[0].cells):
            cells = [answer.cells[number] for answer in answers]
            pairs = list(
                zip(
                    cells,
                    (answer.cells[number] for answer in rounds[UNQUANTIZED]),
                    strict=True,
                )
            )
            row = EngineRow(
                scheme=scheme,
                context=cell.context,
                batch=cell.batch,
                decode=Spread.of([cell.batch / each.decode_seconds for each in cells]),
                decode_over_bf16=Spread.of(
                    [bf16.decode_seconds / each.decode_seconds for each, bf16 in pairs]
                ),
                prefill=Spread.of(
                    [cell.batch * cell.context / each.prefill_seconds for each in cells]
                ),
                prefill_over_bf16=Spread.of(
                    [bf16.prefill_seconds / each.prefill_seconds for each, bf16 in pairs]
                ),
            )
            rows.append(row)
    return rows


def memory_rows(rounds: Rounds) -> list[MemoryRow]:
    """Return a row for each scheme and kind that was the first of a process. A later kind has no
    peak of its own.
    """
    rows = []
    for scheme, answers in rounds.items():
        pairs: dict[str, list[tuple[int, int]]] = {}
        for answer, bf16 in zip(answers, rounds[UNQUANTIZED], strict=True):
            first = next(iter(answer.steps))
            pairs.setdefault(first, []).append((answer.peak_bytes, bf16.peak_bytes))
        for kind, peaks in sorted(pairs.items()):
            row = MemoryRow(
                scheme=scheme,
                kind=kind,
                peak_bytes=Spread.of([peak for peak, _ in peaks]),
                over_bf16=Spread.of([peak / bf16 for peak, bf16 in peaks]),
            )
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Step:
    """Seconds of one round's step, of every phase the quickest. rest: all phases but sampling."""

    sample: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.sample + self.rest


def step_rows(rounds: Rounds) -> list[StepRow]:
    """Return a row for each scheme and kind. The engine samples alike for a plain learner and for
    QaRL, so both have the quicker of its times.
    """
    bf16 = [_step(answer, UNQUANTIZED) for answer in rounds[UNQUANTIZED]]
    return [
        _row(scheme, kind, answers, bf16)
        for scheme, answers in rounds.items()
        # plain before qarl, whatever was measured first
        for kind in sorted(answers[0].steps)
    ]


def _row(scheme: str, kind: str, answers: Sequence[Answer], bf16: Sequence[_Step]) -> StepRow:
    steps = [_step(answer, kind) for answer in answers]
    pairs = list(zip(steps, bf16, strict=True))
    low_bit = kind != UNQUANTIZED
    plain = [_step(answer, "plain") for answer in answers] if kind == "qarl" else []
    plain_pairs = list(zip(steps, plain, strict=True)) if plain else []
    phases = [_phases(answer, kind) for answer in answers]
    return StepRow(
        scheme=scheme,
        kind=kind,
        seconds=Spread.of([step.seconds for step in steps]),
        phases={phase: statistics.median(each[phase] for each in phases) for phase in PHASES},
        of_bf16=Spread.of([step.seconds / other.seconds for step, other in pairs]),
        rest_of_bf16=Spread.of([step.rest / other.rest for step, other in pairs]),
        sampling=statistics.median(step.sample / step.seconds for step in steps),
        sampling_speedup=Spread.of([other.sample / step.sample for step, other in pairs]),
        kept=(
            Spread.of([kept(step.sample, step.rest, other.rest) for step, other in pairs])
            if low_bit
            else None
        ),
        kept_at_share=(
            Spread.of([_kept_at_share(step, other) for step, other in pairs]) if low_bit else None
        ),
        over_plain=(
            Spread.of([step.seconds / other.seconds - 1 for step, other in plain_pairs])
            if plain
            else None
        ),
        over_plain_at_share=(
            Spread.of([_over_at_share(step, other) for step, other in plain_pairs])
            if plain
            else None
        ),
    )


def kept(sample: float, rest: float, rest_bf16: float) -> float:
    """Return the fraction of the engine's gain that a step keeps.

    It is the step's speed-up over that of a step whose sampling alone is quicker: (b + r₀) / (s +
    r) over (b + r₀) / (s + r₀), where bf16's sampling b cancels. sample s, rest r: seconds of the
    low-bit step, of sampling and of all else. rest_bf16 r₀: seconds of all else of bf16's.
    """
    return (sample + rest_bf16) / (sample + rest)


def _kept_at_share(step: _Step, bf16: _Step) -> float:
    """Return `kept` in seconds of a bf16 step of 1 s of which sampling has `SAMPLING_SHARE`."""
    rest = 1 - SAMPLING_SHARE
    return kept(SAMPLING_SHARE * step.sample / bf16.sample, rest * step.rest / bf16.rest, rest)


def _over_at_share(step: _Step, plain: _Step) -> float:
    return (1 - SAMPLING_SHARE) * (step.rest / plain.rest - 1)


def _step(answer: Answer, kind: str) -> _Step:
    phases = _phases(answer, kind)
    return _Step(phases["sample"], sum(phases.values()) - phases["sample"])


def _phases(answer: Answer, kind: str) -> dict[str, float]:
    """Return the seconds of each phase, of the quickest step, which was disturbed least. Sampling
    is the quickest over all kinds, because one engine samples for them.
    """
    phases = {phase: min(step[phase] for step in answer.steps[kind]) for phase in PHASES}
    sampling = [step["sample"] for steps in answer.steps.values() for step in steps]
    return phases | {"sample": min(sampling)}
