"""Complete runs, memory plans and evaluations, as the commands do them."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.configs.load import chosen_config, load_config
from qarl.configs.schema.base import differing
from qarl.configs.schema.run import RunConfig
from qarl.configs.yaml_file import as_texts
from qarl.planning.machine import planned_machine
from qarl.planning.plan import MemoryPlan, make_plan
from qarl.planning.shapes import sizes_of
from qarl.preflight.files import check_files
from qarl.preflight.memory import plan_memory
from qarl.preflight.schemes import check_fit
from qarl.quant.runtime.imports import collections_paused
from qarl.report.loggers import step_logger
from qarl.report.run_folder import RunFolder, resumed_config
from qarl.report.startup import phase, phases_shown_on
from qarl.run.evaluation_plan import EvaluationPlan, Suite, plan_evaluation

if TYPE_CHECKING:  # which import torch
    from qarl.evaluation.results import Evaluation
    from qarl.learner.processes import Processes
    from qarl.run.verify_export import RunOutcome
    from qarl.start import RunStart


def config(
    source: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return a run's configuration, checked.

    source: a YAML file or the name of a shipped one. Default: the model's own file if there is one,
    otherwise the default file. overrides: fields by name, such as {"learner.optimizer.lr": 1e-4} or
    {"lr": 1e-4}. If they choose another task or objective than the file, its defaults apply.
    Raises `ConfigError`, which names the field, and `SchemeError` for an unknown scheme.
    """
    by_field = {}
    for name, value in (overrides or {}).items():
        field = FLAGS.get(name.replace("_", "-"), name)
        by_field[field] = value
    return chosen_config(None if source is None else str(source), as_texts(by_field))


def plan(
    config: RunConfig,
    gpus: str | None = None,
    processes: int | None = None,
) -> MemoryPlan:
    """Estimate the memory that a run would take, in bytes, and compare it with a machine's.

    The plan also has the configuration with all choices made that were left to it. No weight is
    loaded. gpus: "8xH100", "8x80GB", or "4x8xH100" for four machines. Default: this machine.
    processes: default: one per GPU of `gpus`, or one. Raises `SchemeError` if a matrix does not fit
    its scheme, `ModelError`, and `ConfigError` for more processes than GPUs.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"processes {processes} must be at least 1")
    machine = planned_machine(gpus)
    shapes, source = sizes_of(config.model)
    check_fit(config, shapes)
    return make_plan(config, shapes, source, machine, processes or (machine.devices if gpus else 1))


def train(
    config: RunConfig | None = None,
    *,
    resume: str | Path | None = None,
    allow_changed_inputs: bool = False,
    console: Console | None = None,
) -> "RunOutcome":
    """Train as `qarl train` does, in this process, which a launcher may have started as one of
    several.

    Returns the run's folder, steps done, export and held-out accuracies. Raises the error of
    whatever is wrong, before a folder is made if possible. A run that fails later keeps its
    checkpoints.

    config: a configuration by `qarl.config`. resume: folder of a run to continue instead, with its
    own configuration. allow_changed_inputs: continue it even if its questions, functions or model
    files have changed. console: rich's console for the dashboard. Default: print nothing.
    """
    if (config is None) == (resume is None):
        raise ConfigError(
            "qarl.train takes a configuration (qarl.config) or the run to resume; give one of them"
        )
    if allow_changed_inputs and resume is None:
        raise ConfigError("allow_changed_inputs is for a run to resume; omit it")
    folder = None
    if resume is not None:
        config, folder = resume_run(str(resume), {})
    assert config is not None
    console = console or Console(quiet=True)
    requested = config
    config = plan_memory(config, None, {}, None, console.print)
    return run(start_run(config, requested, folder, console, allow_changed_inputs), console)


def start_run(
    config: RunConfig,
    requested: RunConfig,
    folder: RunFolder | None,
    console: Console,
    allow_changed_inputs: bool = False,
) -> "RunStart":
    """Check a run's input, join the processes that were launched with this one, and make the run's
    folder.

    Raises what `qarl.preflight.files`, `qarl.preflight.prepare` and `agreed` raise.

    Args:
        config: The run's configuration, with all choices made.
        requested: The configuration that this process was started with.
        folder: Folder of the run to continue. None: it is made.
        console: Prints the phases.
        allow_changed_inputs: See `qarl.start.RunStart`.
    """
    with phases_shown_on(console):
        with phase("checking input"):
            task = check_files(config, new=folder is None)
        with phase("importing torch, transformers and compressed-tensors"), collections_paused():
            from qarl.learner.processes import join_processes
            from qarl.preflight.prepare import prepare
            from qarl.start import RunStart
        processes = join_processes(alone=config.learner.deepspeed is not None)
        config = agreed(config, requested, processes)
        inputs = prepare(config, task, processes, saves=True)
    resume = folder is not None
    folder = folder or processes.run_on_first(lambda: RunFolder.create(config))
    return RunStart(
        config=config,
        folder=folder,
        processes=processes,
        inputs=inputs,
        resume=resume,
        allow_changed_inputs=allow_changed_inputs,
    )


def resume_run(run: str, overrides: Mapping[str, str]) -> tuple[RunConfig, RunFolder]:
    """Return the configuration with which a run continues, and its folder.

    overrides: fields that may change. Raises `ConfigError` for other fields, and for fewer steps
    than the run has done.
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


def run(start: "RunStart", console: Console) -> "RunOutcome":
    """Train in a run's folder, which is locked meanwhile.

    A start that fails leaves no new folder behind. Raises what the loop raises, and
    `LostProcessError` if another process of the run has ended.
    """
    from qarl.learner.processes import LostProcessError, is_lost_process
    from qarl.loop import train
    from qarl.report.dashboard import Dashboard

    config = start.config
    folder = start.folder
    first_process = start.processes.first
    try:
        lock = folder.locked() if first_process else nullcontext()
        # Before the model is loaded, so that a failing login costs no time.
        logger = step_logger(config, folder.path, first_process)
        with (
            phases_shown_on(console),
            lock,
            logger as log,
            Dashboard(config, console) as dashboard,
        ):
            if start.resume and first_process:
                folder.write_config(config)
            return train(start, dashboard, log)
    except RuntimeError as error:
        if is_lost_process(error):
            raise LostProcessError(str(error)) from error
        raise
    finally:
        if not start.resume and first_process and not folder.has_begun():
            folder.discard()


def agreed(config: RunConfig, requested: RunConfig, processes: "Processes") -> RunConfig:
    """Return the first process's configuration in all processes.

    Their plans may differ, because their machines may have had other amounts of free memory.
    requested: configuration that this process was started with. Raises `ConfigError` if the
    processes were started with different ones.
    """
    first, *others = processes.all_gather(requested)

    def checked() -> RunConfig:
        for index, other in enumerate(others, 1):
            for path, (of_first, of_other) in differing(first, other).items():
                raise ConfigError(
                    f"process {index} was started with {path} {of_other!r}, process 0 with"
                    f" {of_first!r}; start all of a run's processes with one configuration"
                )
        return config

    return processes.run_on_first(checked)


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
    """Measure held-out accuracy of a run, an export or any checkpoint, through vLLM.

    The result has `.results`, by question and sample.

    Args:
        target: The run, export or checkpoint.
        overrides: Fields of `task.*` and `eval.*` by dotted name. Default: the run's.
        suite: Benchmarks to ask instead of a task (`qarl eval --help`).
        data: Folder with local copies of the benchmarks.
        max_new_tokens: Limit of an answer. Default: the run's.
        max_prompt_tokens: Limit of a prompt. Default: the run's.
        dtype: Compute dtype. Default: the run's.
        seed: Seed of problems and sampling.

    Raises:
        ConfigError, ModelError, TaskError: The target or an option cannot be evaluated.
        EngineError: vLLM does not start.
    """
    if data is not None and suite is None:
        raise ConfigError(f"data {str(data)!r} is a suite's; name one, or omit it")
    benchmarks = Suite(suite, None if data is None else Path(data)) if suite else None
    plan = plan_evaluation(
        str(target),
        as_texts(overrides or {}),
        max_new_tokens,
        max_prompt_tokens,
        dtype,
        benchmarks,
    )
    return evaluated(plan, seed)


def evaluated(plan: EvaluationPlan, seed: int) -> "Evaluation":
    """Run a planned evaluation with a fresh engine, as `qarl eval` does."""
    tasks = plan.tasks()
    with phase("importing torch and transformers"):
        from qarl.run.evaluate import evaluate
    return evaluate(plan, tasks, seed)
