"""`qarl plan`: compare the memory that a run would take, part by part, with a machine's.

`qarl train` prints the total at start-up.
"""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.help import add_flags
from qarl.cli.options import add_count, add_json, say, write_json
from qarl.configs.load import chosen_config
from qarl.planning.choice import choose
from qarl.planning.machine import planned_machine
from qarl.planning.plan import make_plan
from qarl.planning.shapes import sizes_of
from qarl.planning.words import as_data, remedies, table
from qarl.preflight.schemes import check_fit

DOES_NOT_FIT = 2
"""Exit status if the run does not fit the machine."""


def add_plan(commands: Any) -> None:
    """Add `qarl plan` to the commands."""
    parser = commands.add_parser(
        "plan",
        help="Show the memory that a run would take, before anything is loaded.",
        usage="qarl plan [--gpus 8xH100] [OPTIONS] [--ANY.FIELD VALUE …]",
        description=(
            "Show the memory that a run would take, part by part, from the model's config.json"
            " alone. Options are those of `qarl train`. If the run does not fit, the exit status is"
            " 2, and remedies and a command whose memory fits are printed."
        ),
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file, or a shipped name. Default: as `qarl train`."
    )
    parser.add_argument(
        "--gpus",
        help=(
            "GPUs to plan for instead of this machine's, such as 8xH100 (A100, L40S, H100, H200,"
            " B200) or 8x80GB; 4x8xH100 is four machines."
        ),
    )
    add_count(parser, "--processes", "Number of processes. Default: one per GPU.")
    add_json(parser, "Write the plan as JSON too.")
    add_flags(parser)
    parser.set_defaults(run=_plan)


def _plan(known: argparse.Namespace, console: Console) -> int:
    config = chosen_config(known.config, known.overrides)
    machine = planned_machine(known.gpus)
    choice = choose(config, known.overrides, known.config, known.processes, machine)
    overrides = choice.overrides(known.overrides)
    planned = chosen_config(choice.file, overrides)
    shapes, source = sizes_of(planned.model)
    check_fit(planned, shapes)
    memory = make_plan(planned, shapes, source, machine, choice.processes)
    lines: list[str] = []
    if choice.words:
        lines += ["chosen, as `qarl train` would:", *(f"  {line}" for line in choice.words), ""]
    lines += table(memory)
    if not memory.fits:
        lines += remedies(memory, overrides, choice.file)
    say(console, "\n".join(lines))
    write_json(known.json, as_data(memory))
    return 0 if memory.fits else DOES_NOT_FIT
