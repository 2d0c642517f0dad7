"""The `qarl` program, with the commands train and export. Other commands have modules of their own.

Heavy imports wait until a command needs them.
"""

import argparse
import platform
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from qarl.api.runs import join_launched, resume_run, run
from qarl.cli.bench import add_bench
from qarl.cli.check import add_check
from qarl.cli.compare import add_compare
from qarl.cli.environment import quiet_libraries, write_in_any_encoding
from qarl.cli.eval import add_eval
from qarl.cli.help import EPILOG, add_flags
from qarl.cli.init import add_init
from qarl.cli.mismatch import add_mismatch
from qarl.cli.options import add_count, dotted_overrides, say
from qarl.cli.parser import Parser, PrintAndExit, normalized_argv
from qarl.cli.plan import add_plan
from qarl.cli.report import add_report
from qarl.cli.runs import add_runs
from qarl.cli.sample import add_sample
from qarl.cli.schemes import add_schemes
from qarl.cli.serve import add_serve
from qarl.cli.serve_rollouts import add_serve_rollouts
from qarl.cli.sft import add_sft
from qarl.cli.tasks import add_tasks
from qarl.cli.verify import add_verify
from qarl.configs.errors import ConfigError, QarlError, disk_error, install_error
from qarl.configs.load import chosen_config, default_config
from qarl.configs.schema.run import RunConfig
from qarl.configs.version import VERSION
from qarl.planning.choice import choose
from qarl.planning.machine import Machine, this_machine
from qarl.preflight.files import check_files, check_new_folder, check_processes
from qarl.preflight.memory import plan_memory
from qarl.ptq.compressor import require_llmcompressor
from qarl.quant.runtime.answers import versions
from qarl.quant.runtime.parent import launched, local_world_size, rank, world_size
from qarl.report.run_folder import ChangedInputsError, RunFolder, RunInUseError
from qarl.report.startup import phase, phases_shown_on
from qarl.run.export_note import find_export, is_finished
from qarl.run.interrupt import interruptible, signal_of
from qarl.run.replay import replay_config
from qarl.tasks import RewardError, Task


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done. 1: a run failed. 2: unusable input. 128 and a signal's number: stopped by it, as 130 by
    Ctrl-C and 143 by SIGTERM.
    """
    return run_command(_parser(), sys.argv[1:] if argv is None else argv)


def run_command(parser: Parser, arguments: list[str]) -> int:
    """Run the command that `arguments` name, print its error if it has one, and return the exit
    status (see `main`).
    """
    write_in_any_encoding()
    console = Console()
    errors = Console(stderr=True)
    try:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        known, rest = parser.parse_known_args(normalized_argv(arguments[:end]))
        # dotted fields are options of some commands only, and so is what follows -- for vLLM
        unexpected = [] if known.fields else list(rest)
        if not known.engine:
            unexpected += arguments[end:]
        if unexpected:
            raise ConfigError(
                f"unexpected argument {unexpected[0]!r}; this command's --help lists what it takes"
            )
        known.arguments = arguments
        known.to_vllm = arguments[end + 1 :]
        known.overrides = dotted_overrides(known, rest)
        return known.run(known, console)
    except SystemExit as ended:  # argparse's own, after --help and --version
        return ended.code if isinstance(ended.code, int) else 0
    except KeyboardInterrupt as interrupt:
        number = signal_of(interrupt)
        by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
        errors.print(f"interrupted{by}")
        return 128 + number
    except Exception as raised:
        error = (
            raised if isinstance(raised, QarlError) else disk_error(raised) or install_error(raised)
        )
        if error is None:
            raise
        if error.heading:
            process = f"process {rank()}: " if rank() else ""
            errors.print(f"[bold red]{process}{error.heading}:[/] ", end="")
            errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return error.exit_status


def _parser() -> Parser:
    parser = Parser(
        prog="qarl",
        description="Reinforcement learning where sampler and learner share one low-bit tensor.",
        epilog="Pages named docs/… are in the folder that `qarl --version` prints last.",
    )
    parser.add_argument(
        "-V",
        "--version",
        action=PrintAndExit,
        text=_describe_version,
        help="Print the versions installed here, and exit.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_train,
        add_sft,
        add_check,
        add_init,
        _add_export,
        add_eval,
        add_report,
        add_mismatch,
        add_verify,
        add_serve,
        add_serve_rollouts,
        add_sample,
        add_runs,
        add_compare,
        add_bench,
        add_plan,
        add_schemes,
        add_tasks,
    ):
        add(commands)
    return parser


def _describe_version() -> str:
    """Return the versions of QaRL, Python and the libraries that a run computes with, and the docs
    folder, one a line.
    """
    libraries = (f"{name} {release}" for name, release in versions().items() if name != "qarl")
    docs = Path(__file__).resolve().parents[1] / "docs"
    return "\n".join(
        [
            f"qarl {VERSION}",
            f"python {platform.python_version()}",
            *libraries,
            f"docs in {docs}",
        ]
    )


def _add_train(commands: Any) -> None:
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


def _train(known: argparse.Namespace, console: Console) -> int:
    with interruptible():
        return _train_interruptible(known, console)


def _train_interruptible(known: argparse.Namespace, console: Console) -> int:
    requested, folder = _configuration(known, known.overrides)
    config = requested
    machine = this_machine()
    console.quiet = rank() > 0  # of several processes only the first prints
    # processes that --processes started must not choose again: their parent has chosen
    if folder is None and not (launched() and known.processes):
        config = _choose(known, config, machine, console)
    if known.dry_run:
        return _show(config, known.processes or 1, folder is None, console)
    if folder is not None and is_finished(folder, config):
        return _say_finished(folder, config, console)
    launching = known.processes not in (None, 1) and not launched()
    console.quiet = console.quiet or launching
    _say_begun(known, config, console)
    # now, because checking the input may import them, in a user's reward
    quiet_libraries(config.learner.compile is True)
    options = known.overrides if folder is None else {"resume": known.resume}
    config = plan_memory(
        config, known.processes, options, known.config, partial(say, console), machine
    )
    if launching:
        return _launch(known, config, folder is None)
    if launched() and known.processes not in (None, world_size()):
        raise ConfigError(
            f"--processes {known.processes}, but the launcher started {world_size()}; omit it"
        )
    return _run(config, requested, folder, console, known.allow_changed_inputs)


def _checked(config: RunConfig, new: bool, console: Console) -> Task:
    """Check the run's input and return its task.

    new: whether the run folder is to be created.
    """
    with phases_shown_on(console), phase("checking input"):
        task = check_files(config, new)
        if config.quantization.init is not None and new:
            require_llmcompressor()
    return task


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


def _say_begun(known: argparse.Namespace, config: RunConfig, console: Console) -> None:
    """Print what is trained. If a model was given without a configuration file, also print that the
    paper's settings and task apply.
    """
    say(
        console,
        f"qarl {VERSION}: {config.model}, {config.scheme}, {config.dtype}, {config.steps} steps",
    )
    file = default_config(config.model)
    if (
        known.config is None
        and known.resume is None
        and config.from_rollouts is None
        and file.parent.name == "paper"
    ):
        task = "" if config.task.name != "math" else "; task math, the paper's (another: --task)"
        say(
            console,
            f"settings not given are the paper's: --config paper/{file.stem}{task}",
        )


def _launch(known: argparse.Namespace, config: RunConfig, new: bool) -> int:
    """Check the input here, then run the same command in several processes of this machine.

    new: see `_checked`.
    """
    _checked(config, new, Console(quiet=True))
    from qarl.cli.launch import check_count, launch

    check_count(known.processes)
    check_processes(config, known.processes)
    return launch(known.arguments, known.processes)


def _choose(
    known: argparse.Namespace, config: RunConfig, machine: Machine, console: Console
) -> RunConfig:
    """Return the configuration with a choice of how to use this machine's GPUs, unless that was
    given. The choice is printed, and added to the command that starts other processes.
    """
    processes = known.processes
    local_processes = None
    if launched():
        processes = world_size()
        local_processes = local_world_size()
    choice = choose(config, known.overrides, known.config, processes, machine, local_processes)
    for line in choice.words:
        say(console, f"{'# ' if known.dry_run else ''}chosen: {line}")
    known.arguments = [*known.arguments, *choice.arguments(known.config)]
    known.overrides = choice.overrides(known.overrides)
    known.config = choice.file
    if choice.processes > 1 and local_processes is None:
        known.processes = choice.processes
    return chosen_config(known.config, known.overrides) if choice.words else config


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
    resumes = folder is not None
    task = _checked(config, folder is None, console)
    config, folder, processes, ready = join_launched(config, requested, folder, console, task)
    from qarl.cli.outcome import say_outcome
    from qarl.learner.processes import (
        LostProcessError,
        is_lost_process,
        leave_processes,
    )

    say(console, f"run folder: {folder.path}")
    try:
        outcome = run(config, folder, resumes, console, processes, ready, allow_changed_inputs)
    except (QarlError, KeyboardInterrupt) as error:
        if processes.first and not isinstance(error, RunInUseError | ChangedInputsError):
            _say_what_is_left(error, config, folder, console)
        raise
    except RuntimeError as error:
        if is_lost_process(error):
            raise LostProcessError(str(error)) from error
        raise
    if outcome.stopped_by is not None:
        again = f"qarl train --resume {shlex.quote(str(folder.path))}"
        say(console, f"stopped at step {outcome.steps}; continue with: {again}")
    elif processes.first:
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


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="Write a run's deployable checkpoint and prove it in a fresh engine.",
        description=(
            "Write a run's deployable checkpoint and prove it in a fresh engine. A run trained in"
            " a low-bit scheme is exported as the policy it is. With --ptq, llmcompressor quantizes"
            " the run's masters after training, in whatever scheme it sampled: this is the"
            " baseline, not QaRL."
        ),
        epilog=(
            "rtn rounds to nearest, needs no data and takes any scheme. gptq takes weight-only"
            " schemes and those with dynamic activations, awq weight-only int4, smoothquant int8"
            " weights with int8 activations. Calibration sequences are prompts of the run's own"
            " task, each with a completion sampled from the policy."
        ),
    )
    export.add_argument(
        "folder",
        metavar="RUN",
        help=(
            "Run folder, whose newest checkpoint is exported. With --format gguf: a run folder (its"
            " export) or an exported checkpoint."
        ),
    )
    export.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="DIR",
        help="Folder to create, which must not exist.",
    )
    export.add_argument(
        "--format",
        choices=("safetensors", "gguf"),
        default="safetensors",
        help=(
            "Format: safetensors for vLLM and transformers, gguf for llama.cpp and Ollama, with the"
            " same codes (docs/guide/gguf.md). Default: safetensors."
        ),
    )
    ptq = export.add_argument_group("post-training quantization of a run's masters")
    ptq.add_argument("--ptq", metavar="METHOD", help="Method: rtn, gptq, awq or smoothquant.")
    ptq.add_argument(
        "--scheme",
        metavar="NAME",
        help="Low-bit scheme to quantize to. `qarl schemes` lists them.",
    )
    ptq.add_argument(
        "--calibration",
        type=int,
        metavar="N",
        help="Number of calibration sequences to sample. Default: 256.",
    )
    export.set_defaults(run=_export)


def _export(known: argparse.Namespace, console: Console) -> int:
    check_new_folder(Path(known.output), "folder", "--output")
    if known.format == "gguf":
        return _export_gguf(known, console)
    folder = RunFolder.open(Path(known.folder))
    config = folder.config()
    quiet_libraries()
    if known.ptq:
        return _export_ptq(known, console)
    for option in ("scheme", "calibration"):
        if getattr(known, option) is not None:
            raise ConfigError(
                f"--{option} goes with --ptq; without it a run is exported in the scheme it has"
            )
    folder.require_checkpoint()
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.preflight.machine import require_schemes
            from qarl.run.export import export_run
        require_schemes(config)
        exported = export_run(Path(known.folder), Path(known.output))
    say(
        console,
        f"wrote step {exported.step} to {known.output}: {_loaded(exported, 'the learner')}",
    )
    if exported.served is not None:
        say(console, str(exported.served))
    return 0


def _export_gguf(known: argparse.Namespace, console: Console) -> int:
    for option in ("ptq", "scheme", "calibration"):
        if getattr(known, option) is not None:
            raise ConfigError(
                f"--{option} writes safetensors; write them first, and give that folder with"
                " --format gguf"
            )
    find_export(Path(known.folder))  # refused before libraries are imported, which takes seconds
    quiet_libraries()
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.run.gguf import export_gguf
        exported = export_gguf(Path(known.folder), Path(known.output))
    written = exported.written
    count = sum(written.kinds.values())
    kinds = ", ".join(f"{number} {kind}" for kind, number in written.kinds.items())
    say(
        console,
        f"wrote {Path(known.output) / written.name} of {exported.source}:"
        f" {written.size / 2**20:.1f} MiB, sha256 {written.sha256[:16]}…; {count} of {count}"
        f" tensors, read back, equal the export's ({kinds})",
    )
    for remark in exported.remarks:
        say(console, remark)
    return 0


def _export_ptq(known: argparse.Namespace, console: Console) -> int:
    if known.scheme is None:
        raise ConfigError(
            "--ptq needs --scheme, the low-bit scheme to quantize to; `qarl schemes` lists them"
        )
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.ptq.export import export_ptq
        exported = export_ptq(
            Path(known.folder),
            Path(known.output),
            known.ptq,
            known.scheme,
            known.calibration,
        )
    sequences = exported.calibration
    data = (
        f" on {len(sequences)} sequences ({sum(map(len, sequences))} tokens)" if sequences else ""
    )
    say(
        console,
        f"quantized step {exported.step} by {known.ptq} to {known.scheme}{data}; wrote"
        f" {known.output}: {_loaded(exported, 'the unquantized policy')}",
    )
    if exported.served is not None:
        say(console, str(exported.served))
    return 0


def _loaded(exported: Any, reference: str) -> str:
    """Describe the files of an export and how exactly a fresh engine reproduces `reference`.

    exported: a `qarl.run.export.Exported`.
    """
    written = exported.written
    return (
        f"{written.tensors} tensors, {written.bytes / 2**20:.1f} MiB, digest"
        f" {written.hexdigest()[:16]}…; loaded in a fresh engine, mean |Δ log p| against"
        f" {reference} {exported.moved:.2e} nats"
    )
