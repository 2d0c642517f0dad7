"""Whole runs, plans and evaluations, as the commands have them."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.flags import FLAGS
from qarl.configs.load import chosen_config, load_config
from qarl.configs.schema.base import differing
from qarl.configs.schema.run import RunConfig
from qarl.configs.yaml_file import as_texts
from qarl.planning.machine import Machine, planned_machine, this_machine
from qarl.planning.plan import MemoryPlanError, Plan, make_plan
from qarl.planning.shapes import sizes_of
from qarl.planning.words import one_line, remedies, table, verdict
from qarl.quant.runtime.parent import local_world_size, rank, world_size
from qarl.report.loggers import step_logger
from qarl.report.run_folder import RunFolder, resumed_config
from qarl.report.startup import phase, phases_shown_on
from qarl.run.check import check_files, check_schemes
from qarl.run.evaluation_plan import Plan as EvaluationPlan
from qarl.run.evaluation_plan import Suite, plan_evaluation
from qarl.tasks import Task

if TYPE_CHECKING:  # which import torch
    from qarl.evaluation.results import Evaluation
    from qarl.learner.processes import Processes
    from qarl.run.verify_export import Outcome


def config(
    source: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """A run's configuration, checked. source: a YAML file, or a shipped one's name; without it the
    model's own, else the default's. overrides: fields by name, such as {"learner.optimizer.lr":
    1e-4} or {"lr": 1e-4}; those of another task or objective than the file's start from its
    defaults. Raises `ConfigError` naming the field.
    """
    by_field = {
        FLAGS.get(name.replace("_", "-"), name): value for name, value in (overrides or {}).items()
    }
    return chosen_config(None if source is None else str(source), as_texts(by_field))


def plan(config: RunConfig, gpus: str | None = None, processes: int | None = None) -> Plan:
    """The memory that a run would take, in bytes, against a machine's, and the configuration with
    what it left open decided; no weight is loaded. gpus: "8xH100" or "8x80GB", without it this
    machine. processes: by default one a GPU of `gpus`, else one. Raises `SchemeError`,
    `ModelError`, and `ConfigError` for more processes than GPUs.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes {processes} must be at least 1")
    check_schemes(config)
    machine = planned_machine(gpus)
    return make_plan(
        config,
        *sizes_of(config.model),
        machine,
        processes or (machine.count if gpus else 1),
    )


def train(
    config: RunConfig | None = None,
    *,
    resume: str | Path | None = None,
    console: Console | None = None,
) -> "Outcome":
    """Train as `qarl train` does, in this process, which a launcher may have started as one of
    several; returns what it ended with: the run's folder, steps done, the export and held-out
    accuracies.

    config: of `qarl.config`. resume: the folder of a run to go on with instead, by its own
    configuration. console: of rich, for the dashboard; without it nothing is printed. Raises the
    error of whatever is wrong, before a folder is made where that can be; a run that fails later
    keeps its checkpoints.
    """
    if (config is None) == (resume is None):
        raise ConfigError(
            "qarl.train takes a configuration (qarl.config) or the run to resume; give one of them"
        )
    folder = None
    if resume is not None:
        config, folder = resumed(str(resume), {})
    assert config is not None
    shown, requested = console or Console(quiet=True), config
    config = planned(config, None, {}, None, shown.print)
    task = check_files(config, new=folder is None)
    config, into, processes = joined(config, requested, folder, shown, task)
    return run(config, into, folder is not None, shown, processes, task)


def joined(
    config: RunConfig,
    requested: RunConfig,
    folder: RunFolder | None,
    console: Console,
    task: Task,
) -> tuple[RunConfig, RunFolder, "Processes"]:
    """With the processes that were launched with this one: the run's configuration (`agreed`), its
    folder, made anew where there is none, and they. Raises what `agreed` and
    `qarl.run.preflight.check_input` do.
    """
    with phases_shown_on(console):
        with phase("importing torch, transformers and compressed-tensors"):
            from qarl.learner.processes import join_processes
            from qarl.run.preflight import check_input
        processes = join_processes(alone=config.learner.zero_stage is not None)
        config = agreed(config, requested, processes)
        processes.first_does(lambda: check_input(config, task, processes.world))
    return (
        config,
        folder or processes.first_does(lambda: RunFolder.create(config)),
        processes,
    )


def resumed(run: str, overrides: Mapping[str, str]) -> tuple[RunConfig, RunFolder]:
    """The configuration that a run goes on with, and its folder. overrides: fields that may change.
    Raises `ConfigError` for others, and for fewer steps than it has done.
    """
    folder = RunFolder.open(Path(run))
    folder.require_checkpoint()
    started = folder.config()
    config = resumed_config(started, load_config(folder.path / "config.yaml", dict(overrides)))
    done = max(folder.steps(), default=0)
    if config.steps < done:
        raise ConfigError(
            f"steps {config.steps}, but run {run!r} has done {done} already; give at least {done},"
            " or start a new run"
        )
    return config, folder


def run(
    config: RunConfig,
    folder: RunFolder,
    resume: bool,
    console: Console,
    processes: "Processes",
    task: Task | None = None,
) -> "Outcome":
    """Train in a run's folder, which is locked meanwhile; a start that fails leaves no new folder
    behind. task: of the configuration, where it is loaded already.
    """
    from qarl.loop import train
    from qarl.report.dashboard import Dashboard

    try:
        lock = folder.locked() if processes.first else nullcontext()
        # before the model: a login costs nothing then
        logger = step_logger(config, folder.path, processes.first)
        with (
            phases_shown_on(console),
            lock,
            logger as log,
            Dashboard(config, console) as dashboard,
        ):
            if resume and processes.first:
                folder.write_config(config)
            return train(config, folder, dashboard, processes, resume, log, task)
    finally:
        if not resume and processes.first and not folder.has_begun():
            folder.discard()


def planned(
    config: RunConfig,
    processes: int | None,
    overrides: Mapping[str, str],
    file: str | None,
    say: Callable[[str], Any],
    machine: Machine | None = None,
) -> RunConfig:
    """A run's configuration with what it leaves to the plan decided, before anything is loaded; the
    plan's sum is told.

    processes: as asked for, None where a launcher decides. overrides, file: of the command, for the
    one that works. machine: this one, where the driver was asked already. Raises `SchemeError` for
    the name of none, `MemoryPlanError` for a run that is clearly too large for this machine, and
    `ConfigError` for more processes than GPUs. A model without a config.json is left to the checks
    of files.
    """
    check_schemes(config)
    try:
        shapes, source = sizes_of(config.model)
    except ModelError:
        return config
    except ConfigError as error:
        say(f"memory: not planned: {error}")
        return config
    world, here = processes or world_size(), processes or local_world_size()
    plan = make_plan(config, shapes, source, machine or this_machine(), world, here)
    if plan.refused and rank() == 0:
        lines = [
            f"{verdict(plan)} on {plan.machine.name}; nothing was loaded",
            *table(plan),
        ]
        raise MemoryPlanError("\n".join([*lines, *remedies(plan, overrides, file)]))
    say(f"memory, planned: {one_line(plan)}")
    return plan.config


def agreed(config: RunConfig, requested: RunConfig, processes: "Processes") -> RunConfig:
    """What the first process decided of a run, for all of them, whose machines may have had other
    memory free. requested: what this one was started with; raises `ConfigError` where that is
    another configuration.
    """
    first, *others = processes.gathered(requested)

    def of_all() -> RunConfig:
        for index, other in enumerate(others, 1):
            for path, (of_first, of_other) in differing(first, other).items():
                raise ConfigError(
                    f"process {index} was started with {path} {of_other!r}, process 0 with"
                    f" {of_first!r}; start all of a run's processes with one configuration"
                )
        return config

    return processes.first_does(of_all)


def evaluate(
    target: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    suite: str | None = None,
    data: str | Path | None = None,
    max_new_tokens: int | None = None,
    max_prompt_tokens: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> "Evaluation":
    """Held-out accuracy of a run, an export or any checkpoint, through vLLM: `.results`, by
    question and sample.

    overrides: fields of `task.*` and `eval.*` by dotted name; what is left out is the run's. suite:
    benchmarks instead of a task (`qarl eval --help`), data: a folder of local copies.
    max_new_tokens, max_prompt_tokens, dtype: without them the run's. seed: of problems and
    sampling. Raises `ConfigError`, `ModelError` or `TaskError` for what cannot be asked,
    `EngineError` where vLLM does not start.
    """
    if data is not None and suite is None:
        raise ConfigError(f"data {str(data)!r} is a suite's; name one, or leave it out")
    benchmarks = Suite(suite, None if data is None else Path(data)) if suite else None
    limits = max_new_tokens, max_prompt_tokens
    return evaluated(
        plan_evaluation(str(target), as_texts(overrides or {}), *limits, dtype, benchmarks),
        seed,
    )


def evaluated(plan: EvaluationPlan, seed: int) -> "Evaluation":
    """As `qarl eval` does it, from a fresh engine."""
    tasks = plan.tasks()
    with phase("importing torch and transformers"):
        from qarl.run.evaluate import evaluate
    return evaluate(plan, tasks, seed)
