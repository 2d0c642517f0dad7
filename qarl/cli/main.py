"""The `qarl` program: its commands, each a module of this folder, and how an error ends it.

Heavy imports wait until a command needs them.
"""

import platform
import signal
import sys
from pathlib import Path

from rich.console import Console

from qarl.cli.bench import add_bench
from qarl.cli.check import add_check
from qarl.cli.compare import add_compare
from qarl.cli.environment import write_in_any_encoding
from qarl.cli.eval import add_eval
from qarl.cli.export import add_export
from qarl.cli.init import add_init
from qarl.cli.mismatch import add_mismatch
from qarl.cli.options import dotted_overrides
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
from qarl.cli.train import add_train
from qarl.cli.verify import add_verify
from qarl.configs.errors import ConfigError, QarlError, disk_error, install_error
from qarl.configs.version import VERSION
from qarl.quant.runtime.answers import versions
from qarl.quant.runtime.parent import rank
from qarl.run.interrupt import signal_of


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done. 1: a run failed. 2: unusable input. 128 and a signal's number: stopped by it, as 130 by
    Ctrl-C and 143 by SIGTERM.
    """
    return run_command(make_parser(), sys.argv[1:] if argv is None else argv)


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


def make_parser() -> Parser:
    """Return the parser of all commands."""
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
        add_train,
        add_sft,
        add_check,
        add_init,
        add_export,
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
