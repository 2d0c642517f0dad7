"""Figures of the report, made of the processes' answers: medians over rounds, of ratios within a
round.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qarl.bench.job import PHASES, Answer, SpeedOptions
from qarl.configs.schemes import UNQUANTIZED

SAMPLING_SHARE = 0.7
"""Fraction of a step that sampling is assumed to take, for figures "at share"."""

Rounds = Mapping[str, Sequence[Answer]]
"""Answers of each scheme's process, one per round; bf16 is among the schemes."""


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
    """Throughput of one scheme's engine for one context and batch."""

    scheme: str
    context: int
    """Tokens of each prompt."""
    batch: int
    """Number of sequences."""
    decode: Spread
    """Tokens per second of decoding."""
    decode_over_bf16: Spread
    """The same as a multiple of bf16's in the same round."""
    prefill: Spread
    """Tokens per second of prefill."""
    prefill_over_bf16: Spread
    """The same as a multiple of bf16's in the same round."""


@dataclass(frozen=True)
class StepRow:
    """Training step of one scheme and kind. A figure that the kind does not have is None."""

    scheme: str
    kind: str
    """Kind of `qarl.bench.job.KINDS`."""
    seconds: Spread
    """Seconds of the step."""
    phases: dict[str, float]
    """Median seconds of each of `PHASES`."""
    of_bf16: Spread
    """Seconds of the step over bf16's."""
    rest_of_bf16: Spread
    """The same without sampling."""
    sampling: float
    """Fraction of the step that sampling takes."""
    sampling_speedup: Spread
    """Seconds of bf16's sampling over this scheme's."""
    kept: Spread | None
    """The step's speed-up over the speed-up that sampling alone would give it."""
    kept_at_share: Spread | None
    """The same if sampling took `SAMPLING_SHARE` of bf16's step, and all else as long as it did."""
    over_plain: Spread | None
    """Seconds of QaRL's step over the plain one's, minus 1."""
    over_plain_at_share: Spread | None
    """The same if sampling took `SAMPLING_SHARE` of the plain step, and all else as long as it did.
    """


@dataclass(frozen=True)
class MemoryRow:
    """Peak of memory of one scheme's processes whose first learner was of one kind."""

    scheme: str
    kind: str
    """Kind of the first learner."""
    peak_bytes: Spread
    """Peak, bytes."""
    over_bf16: Spread
    """The same as a multiple of bf16's in the same rounds."""


@dataclass(frozen=True)
class SpeedReport:
    """Report of `qarl bench speed`."""

    model: str
    parameters: int
    """Number of the model's parameters."""
    options: SpeedOptions
    skipped: dict[str, str]
    """Schemes that were left out, with the reason."""
    engine: list[EngineRow]
    steps: list[StepRow]
    memory: list[MemoryRow]
    rounds: dict[str, list[Answer]]
    """Answers of each scheme's processes."""


def engine_rows(rounds: Rounds) -> list[EngineRow]:
    """Return a row for each scheme, context and batch."""
    rows = []
    for scheme, answers in rounds.items():
        for number, cell in enumerate(answers[0].cells):
            cells = [answer.cells[number] for answer in answers]
            cells_bf16 = [answer.cells[number] for answer in rounds[UNQUANTIZED]]
            pairs = list(zip(cells, cells_bf16, strict=True))
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
    """Return a row for each scheme and kind that was the first of a process.

    The peak of a later kind is unknown, because the process's peak includes the first one.
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
    """Seconds of one round's step, made of the quickest time of every phase."""

    sample: float
    """Seconds of sampling."""
    rest: float
    """Seconds of all other phases."""

    @property
    def seconds(self) -> float:
        return self.sample + self.rest


def step_rows(rounds: Rounds) -> list[StepRow]:
    """Return a row for each scheme and kind.

    The engine samples in the same way for a plain learner and for QaRL, so both get the quicker of
    its times.
    """
    bf16 = [_step(answer, UNQUANTIZED) for answer in rounds[UNQUANTIZED]]
    return [
        _row(scheme, kind, answers, bf16)
        for scheme, answers in rounds.items()
        # plain before qarl, whatever was measured first
        for kind in sorted(answers[0].steps)
    ]


def _row(
    scheme: str,
    kind: str,
    answers: Sequence[Answer],
    bf16: Sequence[_Step],
) -> StepRow:
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
    r) over (b + r₀) / (s + r₀), where bf16's sampling b cancels.

    sample: s, seconds of sampling in the low-bit step. rest: r, seconds of all else in that step.
    rest_bf16: r₀, seconds of all else in bf16's step.
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
    """Return the seconds of each phase, of its quickest step, which was disturbed least.

    Sampling's is the quickest over all kinds, because one engine samples for all.
    """
    phases = {phase: min(step[phase] for step in answer.steps[kind]) for phase in PHASES}
    sampling = [step["sample"] for steps in answer.steps.values() for step in steps]
    return phases | {"sample": min(sampling)}
