"""`qarl plan`: the memory a run would take, part by part, against a machine's. `qarl train` begins
with its sum.
"""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.help import add_flags
from qarl.cli.options import json_file, say, whole, write_json
from qarl.configs.load import chosen_config
from qarl.planning.choice import choose
from qarl.planning.machine import planned_machine
from qarl.planning.plan import make_plan
from qarl.planning.shapes import sizes_of
from qarl.planning.words import as_data, remedies, table
from qarl.run.check import check_schemes

DOES_NOT_FIT = 2
"""Exit status."""


def add_plan(commands: Any) -> None:
    """Add `qarl plan` to the commands."""
    parser = commands.add_parser(
        "plan",
        help="the memory a run would take, before anything is loaded",
        usage="qarl plan [--gpus 8xH100] [OPTIONS] [--ANY.FIELD VALUE …]",
        description=(
            "The memory a run would take, part by part, from the model's config.json alone; options"
            " are those of `qarl train`. Exit status 2 where it does not fit, with what would help"
            " and a command that works."
        ),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file, or a shipped name")
    parser.add_argument(
        "--gpus",
        help=(
            "plan for these instead of this machine: 8xH100 (A100, L40S, H100, H200, B200), or"
            " 8x80GB"
        ),
    )
    parser.add_argument("--processes", type=whole(1), metavar="N", help="without it one a GPU")
    parser.add_argument("--json", type=json_file, metavar="FILE", help="write the plan as JSON too")
    add_flags(parser)
    parser.set_defaults(run=_plan)


def _plan(known: argparse.Namespace, console: Console) -> int:
    config = chosen_config(known.config, known.overrides)
    check_schemes(config)
    machine = planned_machine(known.gpus)
    choice = choose(config, known.overrides, known.config, known.processes, machine)
    overrides = choice.overrides(known.overrides)
    planned = chosen_config(choice.file, overrides)
    memory = make_plan(planned, *sizes_of(planned.model), machine, choice.processes)
    chosen = (
        ["chosen, as `qarl train` would:", *(f"  {line}" for line in choice.words), ""]
        if choice.words
        else []
    )
    lines = [
        *chosen,
        *table(memory),
        *([] if memory.fits else remedies(memory, overrides, choice.file)),
    ]
    say(console, "\n".join(lines))
    write_json(known.json, as_data(memory))
    return 0 if memory.fits else DOES_NOT_FIT
