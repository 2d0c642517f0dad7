"""`qarl train`."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml
from rich.console import Console

from qarl.api.runs import resume_run, run, start_run
from qarl.cli.environment import quiet_libraries
from qarl.cli.help import EPILOG, add_flags
from qarl.cli.options import add_count, say
from qarl.configs.errors import ConfigError, QarlError
from qarl.configs.load import chosen_config, default_config
from qarl.configs.schema.run import RunConfig
from qarl.configs.version import VERSION
from qarl.planning.choice import choose
from qarl.planning.machine import Machine, this_machine
from qarl.preflight.files import check_files, check_processes
from qarl.preflight.memory import plan_memory
from qarl.quant.runtime.parent import launched, local_world_size, rank, world_size
from qarl.report.run_folder import ChangedInputsError, RunFolder, RunInUseError
from qarl.run.export_note import is_finished
from qarl.run.interrupt import interruptible
from qarl.run.replay import replay_config
from qarl.tasks import RewardError


def add_train(commands: Any) -> None:
    """Add `qarl train` to the program's commands."""
    train = commands.add_parser(
        "train",
        help="Train a policy.",
        usage="qarl train [OPTIONS] [--ANY.FIELD VALUE …]",
        description=(
            "Train a policy. Without --model and --config this is the embedded default, which"
            " takes minutes on a CPU."
        ),
        epilog=EPILOG,
    )
    train.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file, or a shipped name such as small.",
    )
    train.add_argument("--resume", metavar="RUN", help="Continue a run from its newest checkpoint.")
    train.add_argument(
        "--allow-changed-inputs",
        action="store_true",
        help="Resume even if questions, code or model changed.",
    )
    add_count(
        train,
        "--processes",
        "Learn and sample in N processes of this machine, one per GPU. On several machines,"
        " start this command with torchrun or deepspeed instead.",
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="Print the resolved configuration, and exit.",
    )
    add_flags(train)
    train.set_defaults(run=_train)


@dataclass(frozen=True)
class _Command:
    """What one command trains, and how it would be written with every choice made."""

    config: RunConfig
    """The configuration with the choices."""
    file: str | None
    """Value of --config: the user's, or the name of the recipe that was chosen."""
    overrides: Mapping[str, str]
    """Dotted path → value of the fields given as options, and of those that were chosen."""
    processes: int | None
    """Value of --processes. None: not given, and none was chosen."""
    arguments: Sequence[str]
    """The command line."""


@interruptible()
def _train(known: argparse.Namespace, console: Console) -> int:
    requested, folder = _configuration(known, known.overrides)
    command = _Command(
        config=requested,
        file=known.config,
        overrides=known.overrides,
        processes=known.processes,
        arguments=tuple(known.arguments),
    )
    machine = this_machine()
    console.quiet = rank() > 0  # of several processes only the first prints
    # processes that --processes started must not choose again: their parent has chosen
    if folder is None and not (launched() and command.processes):
        command = _choose(command, machine, console, "# " if known.dry_run else "")
    if known.dry_run:
        return _show(command.config, command.processes or 1, folder is None, console)
    if folder is not None and is_finished(folder, command.config):
        return _say_finished(folder, command.config, console)
    launching = command.processes not in (None, 1) and not launched()
    console.quiet = console.quiet or launching
    _say_begun(command, console, new=folder is None)
    # now, because checking the input may import them, in a user's reward
    quiet_libraries(command.config.learner.compile is True)
    config = plan_memory(
        command.config,
        command.processes,
        command.overrides if folder is None else {"resume": known.resume},
        command.file,
        partial(say, console),
        machine,
    )
    if launching:
        return _launch(command, config, folder is None)
    if launched() and command.processes not in (None, world_size()):
        raise ConfigError(
            f"--processes {command.processes}, but the launcher started {world_size()}; omit it"
        )
    return _run(config, requested, folder, console, known.allow_changed_inputs)


def _show(config: RunConfig, processes: int, new: bool, console: Console) -> int:
    """Print the configuration for `--dry-run`, and raise its errors."""
    check_processes(config, processes)
    say(
        console,
        yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip(),
    )
    # last, because the model may be out of reach here
    check_files(config, new=new, dry=True)
    return 0


def _say_finished(folder: RunFolder, config: RunConfig, console: Console) -> int:
    export = f", and {folder.export} holds its export" if config.export else ""
    say(
        console,
        f"run {folder.path} is finished: {config.steps} of {config.steps} steps are done{export};"
        f" nothing was left to do. To go on: qarl train --resume {folder.path} --steps N",
    )
    return 0


def _say_begun(command: _Command, console: Console, new: bool) -> None:
    """Print what is trained. If a model was given without a configuration file, also print that the
    paper's settings and task apply.

    new: whether no run is continued.
    """
    config = command.config
    say(
        console,
        f"qarl {VERSION}: {config.model}, {config.scheme}, {config.dtype}, {config.steps} steps",
    )
    file = default_config(config.model)
    if (
        command.file is None
        and new
        and config.from_rollouts is None
        and file.parent.name == "paper"
    ):
        task = "" if config.task.name != "math" else "; task math, the paper's (another: --task)"
        say(
            console,
            f"settings not given are the paper's: --config paper/{file.stem}{task}",
        )


def _launch(command: _Command, config: RunConfig, new: bool) -> int:
    """Check the input here, then run the same command in several processes of this machine.

    config: the configuration with all choices made. new: whether the run's folder is to be made.
    """
    check_files(config, new)
    from qarl.cli.launch import check_count, launch

    assert command.processes is not None
    check_count(command.processes)
    check_processes(config, command.processes)
    return launch(command.arguments, command.processes)


def _choose(command: _Command, machine: Machine, console: Console, before: str) -> _Command:
    """Return the command with a choice of how to use this machine's GPUs, unless that was given.

    The choice is printed. before: what each of its lines begins with.
    """
    processes = world_size() if launched() else command.processes
    local_processes = local_world_size() if launched() else None
    choice = choose(
        command.config, command.overrides, command.file, processes, machine, local_processes
    )
    for line in choice.words:
        say(console, f"{before}chosen: {line}")
    if not choice.words:
        return command
    overrides = choice.overrides(command.overrides)
    starts_more = choice.processes > 1 and not launched()
    return _Command(
        config=chosen_config(choice.file, overrides),
        file=choice.file,
        overrides=overrides,
        processes=choice.processes if starts_more else command.processes,
        arguments=(*command.arguments, *choice.arguments(command.file)),
    )


def _configuration(
    known: argparse.Namespace, overrides: dict[str, str]
) -> tuple[RunConfig, RunFolder | None]:
    """Return the requested configuration, and the folder of the run to continue or None."""
    if known.resume is None and known.allow_changed_inputs:
        raise ConfigError(
            "--allow-changed-inputs goes with --resume; a new run takes the inputs it finds:"
            " omit it"
        )
    if known.resume is None and "from_rollouts" in overrides:
        if known.config is not None:
            raise ConfigError(
                f"--from-rollouts has the recorded run's configuration; --config {known.config}"
                " does not apply: omit it, and change single fields"
            )
        return replay_config(overrides), None
    if known.resume is None:
        return chosen_config(known.config, overrides), None
    for option, value in (
        ("config", known.config),
        ("output", overrides.get("output")),
    ):
        if value is not None:
            raise ConfigError(
                "--resume continues a run with its own configuration, in its own folder;"
                f" --{option} {value} does not apply: omit it"
            )
    return resume_run(known.resume, overrides)


def _run(
    config: RunConfig,
    requested: RunConfig,
    folder: RunFolder | None,
    console: Console,
    allow_changed_inputs: bool,
) -> int:
    """Train in this process, which may be one of several, and return the exit status.

    requested: the configuration before a choice was made. folder: of the run to continue, or None.
    """
    start = start_run(config, requested, folder, console, allow_changed_inputs)
    from qarl.cli.outcome import say_outcome
    from qarl.learner.processes import LostProcessError, leave_processes

    config = start.config
    folder = start.folder
    first_process = start.processes.first
    say(console, f"run folder: {folder.path}")
    try:
        outcome = run(start, console)
    except LostProcessError:
        raise
    except (QarlError, KeyboardInterrupt) as error:
        if first_process and not isinstance(error, RunInUseError | ChangedInputsError):
            _say_what_is_left(error, config, folder, console)
        raise
    if outcome.stopped_by is not None:
        again = f"qarl train --resume {shlex.quote(str(folder.path))}"
        say(console, f"stopped at step {outcome.steps}; continue with: {again}")
    elif first_process:
        say_outcome(config, folder, outcome, console)
    leave_processes()
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _say_what_is_left(
    error: BaseException, config: RunConfig, folder: RunFolder, console: Console
) -> None:
    """Print how to continue a run that failed or was interrupted from its newest readable
    checkpoint.
    """
    from qarl.run.checkpoint import intact_checkpoint, list_checkpoints

    if isinstance(error, KeyboardInterrupt):  # which leaves no time to read a checkpoint
        intact = next(reversed(list_checkpoints(folder.checkpoints)), None)
    else:
        intact = intact_checkpoint(folder.checkpoints)
    if intact is not None:
        more = ""
        if isinstance(error, RewardError) and config.task.reward and config.task.on_error == "stop":
            more = " --task.on_error none, which leaves out completions whose reward fails"
        resumed_by = f"qarl train --resume {shlex.quote(str(folder.path))}"
        state = "the newest" if isinstance(error, KeyboardInterrupt) else "intact"
        say(console, f"checkpoint {intact.name} is {state}: {resumed_by}{more}")
    elif not folder.path.exists():
        say(console, f"no step was done, so {folder.path} was removed again")
    else:
        say(
            console,
            f"{folder.path} holds no checkpoint to continue from; start the run again with another"
            " --output",
        )
