"""`python -m benchmarks train`: complete trainings, by the time to each held-out accuracy.

Generation is included. QaRL in each scheme is compared with TRL's GRPOTrainer in each setting, on
the same model folder, problems in the same order, completions per step, updates per batch and
held-out problems. Every training runs in a process of its own, one after the other. Evaluations are
not timed, and start-up is reported separately.
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.train.job import Curve, Point, TrlJob, reached, write_problems
from benchmarks.trl_environment import require_trl
from qarl.bench.process import run_worker
from qarl.configs.errors import ConfigError
from qarl.configs.load import default_config, load_config
from qarl.configs.schema.run import RunConfig
from qarl.preflight.prepare import prepare
from qarl.run.evaluate import problems_once
from qarl.run.policy import model_folder
from qarl.tasks import Response, load_task


@dataclass(frozen=True)
class TrainOptions:
    """Options of `python -m benchmarks train`."""

    schemes: tuple[str, ...]
    """QaRL's schemes."""
    seeds: tuple[int, ...]
    trl: tuple[str, ...]
    """TRL's settings; empty without `--against trl`."""
    trl_python: Path
    """Python interpreter of TRL's environment."""
    trl_lr: float
    """Learning rate of TRL's AdamW."""
    every: int
    """Steps between evaluations."""
    targets: tuple[float, ...]
    """Held-out accuracies in (0, 1)."""
    overrides: dict[str, str]
    """Settings of QaRL's configuration, by dotted path.

    TRL takes over those that it has too: model, task, rollout, steps, mini-batches.
    """


@dataclass(frozen=True)
class Training:
    """One training."""

    trainer: str
    """`qarl` or `trl`."""
    setting: str
    """QaRL's scheme or TRL's setting."""
    seed: int
    startup: float
    """See `Curve.startup`."""
    points: tuple[Point, ...]
    """See `Curve.points`."""

    @property
    def label(self) -> str:
        """Name of the trainer and its setting."""
        return f"{self.trainer} {self.setting}"


@dataclass(frozen=True)
class Reached:
    """Cost at which a trainer reached `accuracy`.

    Seconds and samples are medians over the seeds; they are None unless every seed reached it.
    """

    trainer: str
    setting: str
    accuracy: float
    seconds: float | None
    cpu_seconds: float | None
    samples: float | None
    of_trl: float | None
    """Seconds over those of TRL's quickest setting to that accuracy.

    It is the median over the seeds of ratios of the same seed; None if either side is missing.
    """
    cpu_of_trl: float | None
    """The same ratio of CPU seconds, with TRL's quickest setting by CPU seconds."""


def measure(options: TrainOptions, say: Callable[[str], None]) -> list[Training]:
    """Return a training for each seed and trainer.

    say: called with a line of progress before each training. Raises `ConfigError`, or the error of
    the part that is wrong, before anything is trained.
    """
    check(options)
    trainings = []
    for seed in options.seeds:
        for setting in options.trl:
            say(f"seed {seed}: trl {setting}")
            trainings.append(_training("trl", setting, seed, _trl(options, setting, seed)))
        for scheme in options.schemes:
            say(f"seed {seed}: qarl {scheme}")
            trainings.append(
                _training("qarl", scheme, seed, _qarl(config_of(options, scheme, seed)))
            )
    return trainings


def check(options: TrainOptions) -> None:
    """Raise an error for options that cannot be measured."""
    for key in sorted(
        options.overrides.keys() & {"scheme", "seed", "output", "export", "eval.every"}
    ):
        raise ConfigError(f"--{key} is chosen by the benchmark; its --help lists its own options")
    if not options.schemes:
        raise ConfigError("--schemes is empty; give at least one, such as bf16")
    if options.trl:
        _check_trl(options)
    for scheme in options.schemes:
        config = config_of(options, scheme, options.seeds[0])
        prepare(config, load_task(config.task))


def _check_trl(options: TrainOptions) -> None:
    require_trl(options.trl_python)
    if options.trl_lr <= 0:
        raise ConfigError(f"--trl-lr {options.trl_lr:g} must be above 0")
    config = config_of(options, options.schemes[0], options.seeds[0])
    reward = config.task.reward
    if reward is None or ":" not in reward or "," in reward:
        raise ConfigError(
            f"task.reward {reward!r}: --against trl needs a reward that TRL can call,"
            " one function (problem, text) such as qarl.tasks:exact_reward"
        )
    if config.rollout.dynamic_sampling is not None:
        raise ConfigError(
            f"--rollout.dynamic_sampling {config.rollout.dynamic_sampling}: TRL has none; drop it"
            " or --against trl"
        )
    if config.rollout.prompts % config.learner.mini_batches:
        raise ConfigError(
            f"learner.mini_batches {config.learner.mini_batches} does not divide rollout.prompts "
            f"{config.rollout.prompts}, as TRL needs it to; choose one that does"
        )


def config_of(options: TrainOptions, scheme: str, seed: int) -> RunConfig:
    """Return the configuration of QaRL's run.

    It is the model's own file with GRPO, unless overrides change it.
    """
    shared = {"learner.objective.name": "grpo", **options.overrides}
    own = {
        "scheme": scheme,
        "seed": str(seed),
        "eval.every": str(options.every),
        "export": "false",
    }
    config = load_config(default_config(options.overrides.get("model")), {**shared, **own})
    if not config.eval.problems:
        raise ConfigError(
            "--eval.problems 0: held-out accuracies are what is compared; give at least 1"
        )
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"every": config.steps})}
    )


def _qarl(config: RunConfig) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        tree = config.model_copy(update={"output": str(Path(folder) / "run")}).model_dump_json()
        return run_worker("benchmarks.train.worker", tree, Curve.parse, f"qarl {config.scheme}")


def _trl(options: TrainOptions, setting: str, seed: int) -> Curve:
    """Train with TRL, and judge its held-out answers in this process by the task's own verdict."""
    config = config_of(options, options.schemes[0], seed)
    task = load_task(config.task)
    held_out = problems_once(task, config.eval.problems, 0)  # the problems that a run evaluates
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problems.json"
        write_problems(
            file,
            task.problems("train", 0, config.steps * config.rollout.prompts, seed),
            held_out,
        )
        job = trl_job(config, options, setting, model_folder(config.model), file)
        worker = "benchmarks.train.trl_worker"
        curve = run_worker(
            worker, job.as_argument(), Curve.parse, f"trl {setting}", options.trl_python
        )

    def accuracy(answers: tuple[str, ...]) -> float:
        responses = [
            Response(problem, text) for problem, text in zip(held_out, answers, strict=True)
        ]
        return sum(task.correct(responses)) / len(held_out)

    points = zip(curve.points, curve.answers, strict=True)
    return Curve(
        curve.startup,
        tuple(dataclasses.replace(p, accuracy=accuracy(texts)) for p, texts in points),
    )


def trl_job(
    config: RunConfig, options: TrainOptions, setting: str, model: Path, problems: Path
) -> TrlJob:
    """Return the job that TRL takes over from QaRL's configuration."""
    assert config.task.reward is not None
    return TrlJob(
        model=str(model),
        problems=str(problems),
        reward=config.task.reward,
        setting=setting,
        steps=config.steps,
        prompts=config.rollout.prompts,
        samples=config.rollout.samples,
        updates=config.learner.mini_batches,
        max_new_tokens=config.rollout.max_new_tokens,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        every=options.every,
        lr=options.trl_lr,
        seed=config.seed,
    )


def _training(trainer: str, setting: str, seed: int, curve: Curve) -> Training:
    return Training(
        trainer=trainer,
        setting=setting,
        seed=seed,
        startup=curve.startup,
        points=curve.points,
    )


def summary(trainings: list[Training], targets: tuple[float, ...]) -> list[Reached]:
    """Return a row for each trainer and target."""
    return [
        _reached(
            trainer,
            setting,
            [t for t in trainings if (t.trainer, t.setting) == (trainer, setting)],
            trainings,
            target,
        )
        for trainer, setting in dict.fromkeys((t.trainer, t.setting) for t in trainings)
        for target in targets
    ]


def _reached(
    trainer: str,
    setting: str,
    own: list[Training],
    trainings: list[Training],
    target: float,
) -> Reached:
    points = {training.seed: reached(training.points, target) for training in own}

    def over_seeds(name: str) -> float | None:
        values = [getattr(point, name) for point in points.values() if point is not None]
        return median(values) if len(values) == len(points) else None

    def over_trl(name: str) -> float | None:
        ratios = []
        for seed, point in points.items():
            rivals = [
                reached(t.points, target) for t in trainings if (t.trainer, t.seed) == ("trl", seed)
            ]
            times = [getattr(rival, name) for rival in rivals if rival is not None]
            if point is None or not times or not min(times):
                return None
            ratios.append(getattr(point, name) / min(times))
        return median(ratios)

    return Reached(
        trainer=trainer,
        setting=setting,
        accuracy=target,
        seconds=over_seeds("seconds"),
        cpu_seconds=over_seeds("cpu_seconds"),
        samples=over_seeds("samples"),
        of_trl=over_trl("seconds"),
        cpu_of_trl=over_trl("cpu_seconds"),
    )


def as_data(trainings: list[Training], options: TrainOptions) -> dict[str, Any]:
    """Return every evaluation of every training, and the table's figures, as JSON-ready data.

    `threads` is OMP_NUM_THREADS, or None if libraries choose the number.
    """
    return {
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "trainings": [dataclasses.asdict(training) for training in trainings],
        "reached": [dataclasses.asdict(row) for row in summary(trainings, options.targets)],
    }
