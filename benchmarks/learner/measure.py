"""`python -m benchmarks learner`: a learner step per scheme against the bf16 step, and against
TRL's training step.

Every trainer runs in a process of its own, one after the other; rounds are interleaved, and all
ratios are between processes of the same round. Each takes the same batch and proves by a digest
that it trained on those tokens.
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
"""Options of QaRL's learner that its schemes are measured with besides; a setting is a scheme and
one of them, or none: `w4a16`, `w4a16 checkpointing`.
"""

PHASES = ("old", "forward", "backward", "optimizer", "materialize")


@dataclass(frozen=True)
class Options:
    """models: names of `MODELS`. schemes: QaRL's; bf16 is measured in any case. trl: TRL's settings
    to measure, none without `--against trl`. updates: optimizer steps a batch. steps: timed steps a
    process. rounds: of all processes. tokens: median completion instead of the models' own;
    micro_batch_tokens: padded tokens a forward. variants: of `VARIANTS`, to measure QaRL's schemes
    with, too.
    """

    models: tuple[str, ...]
    schemes: tuple[str, ...]
    dtype: str
    trl: tuple[str, ...]
    trl_python: Path
    updates: int
    steps: int
    rounds: int
    tokens: int | None
    micro_batch_tokens: int
    kernel: str
    seed: int
    variants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One trainer on one model. trainer: qarl or trl. setting: scheme, or TRL's. parameters,
    tokens: of the model and of the batch. seconds, cpu_seconds: of a step, median over rounds of
    the medians of their steps; of the clock, and of the process's threads, which other processes
    disturb less. against_bf16, against_trl: that, as a multiple of the bf16 step's and of the
    quickest TRL setting's, medians of the rounds' own ratios. phases: median seconds, `rest` among
    them, empty for TRL. step_bytes, total_bytes: see `StepMemory`. rounds: all seconds.
    """

    model: str
    parameters: int
    tokens: int
    trainer: str
    setting: str
    seconds: float
    cpu_seconds: float
    against_bf16: float
    against_trl: float | None
    phases: dict[str, float]
    step_bytes: int
    total_bytes: int
    rounds: list[list[dict[str, float]]]

    @property
    def tokens_per_second(self) -> float:
        """Prompt and completion, without padding."""
        return self.tokens / self.seconds

    @property
    def materialize_share(self) -> float | None:
        """Of the step's seconds; None for TRL, which has no such phase."""
        return self.phases["materialize"] / self.seconds if self.phases else None


def check(options: Options) -> None:
    """Raise `ConfigError`, `SchemeError` or `KernelError` for what could not be measured, before
    anything is.
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
        raise ConfigError(f"--compile: {missing}; mend that, or leave it out")
    for scheme in options.schemes:
        require_support(get_scheme(scheme), COMPUTE_DTYPES[options.dtype])


def measure(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Rows by model: bf16, the schemes, TRL's settings. say: gets a line before each process."""
    check(options)
    return [row for model in options.models for row in _measure_model(model, options, say)]


def _measure_model(name: str, options: Options, say: Callable[[str], None]) -> Iterator[Row]:
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
        found: dict[tuple[str, str], list[Steps]] = {trainer: [] for trainer in trainers}
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
                found[trainer, setting].append(steps)
    yield from _rows(name, parameters, tokens, found)


def _write(model: BenchModel, folder: Path, seed: int) -> tuple[int, int, str]:
    """Model and batch, in `folder`: parameters, tokens, and the digest of the batch."""
    sequences = draw_sequences(model, seed)
    sequences.save(folder / "batch.json")
    parameters = write_model(model, folder, seed)
    whole = [
        [*sequences.prompts[i // sequences.samples], *completion]
        for i, completion in enumerate(sequences.completions)
    ]
    return parameters, sequences.tokens, digest(whole)


def _job(folder: Path, setting: str, memory: bool, options: Options) -> Job:
    """memory: one that takes a step's memory and no time."""
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
    """One process. wanted: the digest of the tokens it has to train on."""
    python, module = (None, "worker") if trainer == "qarl" else (trl_python, "trl_worker")
    what = f"{trainer} {job.setting}"
    # glibc's heap would count what it keeps of freed memory
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"} if job.memory else {}
    steps = run_worker(
        f"benchmarks.learner.{module}",
        job.as_argument(),
        lambda data: Steps(**data),
        what,
        python,
        environment,
    )
    if steps.digest != wanted:
        raise WorkerError(f"{what} did not train on the batch's own tokens")
    return steps


def _rows(
    model: str, parameters: int, tokens: int, found: dict[tuple[str, str], list[Steps]]
) -> Iterator[Row]:
    seconds = {who: [_median(s.seconds, "total") for s in rounds] for who, rounds in found.items()}
    trl = [times for (trainer, _), times in seconds.items() if trainer == "trl"]
    quickest = [min(times) for times in zip(*trl, strict=True)] if trl else None
    for (trainer, setting), rounds in found.items():
        times = seconds[trainer, setting]
        steps = [{**step, "rest": _rest(step)} for r in rounds for step in r.seconds]
        phases = {p: statistics.median(s.get(p, 0.0) for s in steps) for p in (*PHASES, "rest")}
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
    """What no phase timed: making the batch, cutting it, metrics."""
    return step["total"] - sum(step.get(phase, 0.0) for phase in PHASES)


def _ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(times, others, strict=True))


def as_data(rows: list[Row]) -> list[dict]:
    """JSON-ready, every step of every round included."""
    return [
        {
            **dataclasses.asdict(row),
            "tokens_per_second": row.tokens_per_second,
            "materialize_share": row.materialize_share,
        }
        for row in rows
    ]
