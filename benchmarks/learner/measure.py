"""`python -m benchmarks learner`: a learner step per scheme against bf16 and against TRL.

Every trainer runs in a process of its own, one after the other. Rounds are interleaved, and every
ratio is between processes of the same round. Each process takes the same batch and proves by a
digest that it trained on those tokens.
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.learner.batch import digest, draw_sequences
from benchmarks.learner.job import Job, Steps
from benchmarks.models import MODELS, BenchModel, write_model
from benchmarks.trl_environment import require_trl
from qarl.bench.process import WorkerError, run_worker
from qarl.configs.errors import ConfigError
from qarl.quant.kernels.supported import require_support
from qarl.quant.runtime.compile import compiler_missing
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme

VARIANTS = ("checkpointing", "compile")
"""Options of QaRL's learner that its schemes can be measured with in addition.

A setting is a scheme with one of them or none: `w4a16`, `w4a16 checkpointing`.
"""

PHASES = ("old", "forward", "backward", "optimizer", "materialize")


@dataclass(frozen=True)
class Options:
    """Options of `python -m benchmarks learner`."""

    models: tuple[str, ...]
    """Names of `MODELS`."""
    schemes: tuple[str, ...]
    """QaRL's schemes; bf16 is always measured."""
    dtype: str
    """Compute dtype."""
    trl: tuple[str, ...]
    """TRL's settings to measure; empty without `--against trl`."""
    trl_python: Path
    """Python interpreter of TRL's environment."""
    updates: int
    """Optimizer steps per batch."""
    steps: int
    """Timed steps per process."""
    rounds: int
    """Number of rounds; each round starts all processes."""
    tokens: int | None
    """Median tokens of a completion. None: the model's own value."""
    micro_batch_tokens: int
    """Padded tokens per forward."""
    kernel: str
    seed: int
    variants: tuple[str, ...] = ()
    """Those of `VARIANTS` that QaRL's schemes are measured with in addition."""


@dataclass(frozen=True)
class Row:
    """Figures of one trainer on one model."""

    model: str
    parameters: int
    """Number of the model's parameters."""
    tokens: int
    """Tokens of the batch, without padding."""
    trainer: str
    """`qarl` or `trl`."""
    setting: str
    """QaRL's scheme and variant, or TRL's setting."""
    seconds: float
    """Wall-clock seconds of a step: median over the rounds of each round's median."""
    cpu_seconds: float
    """CPU seconds of a step over all threads, a median like `seconds`.

    Other processes disturb it less than the wall clock.
    """
    against_bf16: float
    """`seconds` as a multiple of the bf16 step's; median of the rounds' own ratios."""
    against_trl: float | None
    """`seconds` as a multiple of TRL's quickest setting; None without TRL.

    It is the median of the rounds' own ratios.
    """
    phases: dict[str, float]
    """Median seconds of each phase, including `rest`; empty for TRL."""
    step_bytes: int
    """See `StepMemory.step`."""
    total_bytes: int
    """See `StepMemory.total`."""
    rounds: list[list[dict[str, float]]]
    """Seconds by phase of every step of every round."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and completions per second, without padding."""
        return self.tokens / self.seconds

    @property
    def materialize_share(self) -> float | None:
        """Fraction of the step's seconds spent materializing; None for TRL, which does not."""
        return self.phases["materialize"] / self.seconds if self.phases else None


def check(options: Options) -> None:
    """Raise `ConfigError`, `SchemeError` or `KernelError` for options that cannot be measured.

    It is called before anything is measured.
    """
    for model in options.models:
        if MODELS[model].prompts % options.updates:
            raise ConfigError(
                f"--updates {options.updates} does not divide the {MODELS[model].prompts} prompts"
                f" of model {model!r}"
            )
    if options.trl and options.dtype != "bfloat16":
        raise ConfigError(f"--against trl is measured in bfloat16, not in --dtype {options.dtype}")
    if options.trl:
        require_trl(options.trl_python)
    missing = compiler_missing("cuda" if torch.cuda.is_available() else "cpu")
    if "compile" in options.variants and missing:
        raise ConfigError(f"--compile: {missing}; fix that, or omit it")
    for scheme in options.schemes:
        require_support(get_scheme(scheme), COMPUTE_DTYPES[options.dtype])


def measure(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Return rows by model: bf16, the schemes, TRL's settings.

    say: called with a line of progress before each process starts.
    """
    check(options)
    return [row for model in options.models for row in _measure_model(model, options, say)]


def _measure_model(
    name: str,
    options: Options,
    say: Callable[[str], None],
) -> Iterator[Row]:
    model = MODELS[name]
    if options.tokens is not None:
        model = dataclasses.replace(model, tokens=options.tokens)
    schemes = list(dict.fromkeys(("bf16", *options.schemes)))
    settings = schemes + [
        f"{scheme} {variant}" for variant in options.variants for scheme in schemes
    ]
    trainers = [("qarl", s) for s in settings] + [("trl", s) for s in options.trl]
    with tempfile.TemporaryDirectory(prefix="qarl-bench-") as folder:
        parameters, tokens, wanted = _write(model, Path(folder), options.seed)
        measured: dict[tuple[str, str], list[Steps]] = {trainer: [] for trainer in trainers}
        for number in range(options.rounds):
            for trainer, setting in trainers:
                say(f"{name}, round {number + 1} of {options.rounds}: {trainer} {setting}")
                memory = None
                if number == 0:
                    memory = _run(
                        trainer,
                        _job(Path(folder), setting, True, options),
                        options.trl_python,
                        wanted,
                    )
                steps = _run(
                    trainer,
                    _job(Path(folder), setting, False, options),
                    options.trl_python,
                    wanted,
                )
                if memory is not None:
                    steps = dataclasses.replace(
                        steps,
                        step_bytes=memory.step_bytes,
                        total_bytes=memory.total_bytes,
                    )
                measured[trainer, setting].append(steps)
    yield from _rows(name, parameters, tokens, measured)


def _write(model: BenchModel, folder: Path, seed: int) -> tuple[int, int, str]:
    """Write model and batch to `folder`; return parameters, tokens and the digest of the batch."""
    sequences = draw_sequences(model, seed)
    sequences.save(folder / "batch.json")
    parameters = write_model(model, folder, seed)
    trained_on = [
        [*sequences.prompts[i // sequences.samples], *completion]
        for i, completion in enumerate(sequences.completions)
    ]
    return parameters, sequences.tokens, digest(trained_on)


def _job(folder: Path, setting: str, memory: bool, options: Options) -> Job:
    """Return the job of one process; `memory` selects one that measures memory instead of time."""
    name, _, variant = setting.partition(" ")
    return Job(
        model=str(folder),
        batch=str(folder / "batch.json"),
        setting=name,
        dtype=options.dtype,
        updates=options.updates,
        micro_batch_tokens=options.micro_batch_tokens,
        steps=0 if memory else options.steps,
        memory=memory,
        kernel=options.kernel,
        variant=variant,
    )


def _run(trainer: str, job: Job, trl_python: Path, wanted: str) -> Steps:
    """Run one process. wanted: the expected digest of the tokens that it trains on."""
    python, module = (None, "worker") if trainer == "qarl" else (trl_python, "trl_worker")
    label = f"{trainer} {job.setting}"
    # glibc maps large blocks one by one then, so that freed memory does not count as resident
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"} if job.memory else {}
    steps = run_worker(
        f"benchmarks.learner.{module}",
        job.as_argument(),
        lambda data: Steps(**data),
        label,
        python,
        environment,
    )
    if steps.digest != wanted:
        raise WorkerError(f"{label} did not train on the batch's own tokens")
    return steps


def _rows(
    model: str, parameters: int, tokens: int, measured: dict[tuple[str, str], list[Steps]]
) -> Iterator[Row]:
    seconds = {
        trainer: [_median(steps.seconds, "total") for steps in rounds]
        for trainer, rounds in measured.items()
    }
    trl = [times for (trainer, _), times in seconds.items() if trainer == "trl"]
    quickest = [min(times) for times in zip(*trl, strict=True)] if trl else None
    for (trainer, setting), rounds in measured.items():
        times = seconds[trainer, setting]
        steps = [{**step, "rest": _rest(step)} for r in rounds for step in r.seconds]
        phases = {
            phase: statistics.median(step.get(phase, 0.0) for step in steps)
            for phase in (*PHASES, "rest")
        }
        yield Row(
            model=model,
            parameters=parameters,
            tokens=tokens,
            trainer=trainer,
            setting=setting,
            seconds=statistics.median(times),
            cpu_seconds=statistics.median(_median(r.seconds, "cpu") for r in rounds),
            against_bf16=_ratio(times, seconds["qarl", "bf16"]),
            against_trl=None if quickest is None else _ratio(times, quickest),
            phases=phases if trainer == "qarl" else {},
            step_bytes=rounds[0].step_bytes,
            total_bytes=rounds[0].total_bytes,
            rounds=[r.seconds for r in rounds],
        )


def _median(steps: list[dict[str, float]], phase: str) -> float:
    return statistics.median(step[phase] for step in steps)


def _rest(step: dict[str, float]) -> float:
    """Return the seconds that no phase timed: making the batch, splitting it, metrics."""
    return step["total"] - sum(step.get(phase, 0.0) for phase in PHASES)


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(times, others, strict=True))


def as_data(rows: list[Row]) -> list[dict]:
    """Return the rows as JSON-ready dictionaries, with every step of every round."""
    return [
        {
            **dataclasses.asdict(row),
            "tokens_per_second": row.tokens_per_second,
            "materialize_share": row.materialize_share,
        }
        for row in rows
    ]
