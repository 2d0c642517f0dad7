"""`qarl plan`: the memory a run would take, part by part, against a machine's. `qarl train` begins with its sum."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from qarl.cli.help import add_flags
from qarl.cli.options import chosen_config, json_file, say, whole, write_json
from qarl.configs.errors import ConfigError, ModelError
from qarl.configs.schema.run import RunConfig
from qarl.plan.machine import parse_machine, this_machine
from qarl.plan.plan import MemoryPlanError, make_plan
from qarl.plan.shapes import sizes_of
from qarl.plan.words import as_data, one_line, remedies, table, verdict
from qarl.run.check import check_schemes

DOES_NOT_FIT = 2
"""Exit status."""


def add_plan(commands: Any) -> None:
    """Add `qarl plan` to the commands."""
    plan = commands.add_parser(
        "plan",
        help="the memory a run would take, before anything is loaded",
        usage="qarl plan [--gpus 8xH100] [OPTIONS] [--ANY.FIELD VALUE …]",
        description="The memory a run would take, part by part, from the model's config.json alone; options are those "
        "of `qarl train`. Exit status 2 where it does not fit, with what would help and a command that works.",
    )
    plan.add_argument("--config", metavar="FILE", help="YAML file, or a shipped name")
    plan.add_argument(
        "--gpus", help="plan for these instead of this machine: 8xH100 (A100, L40S, H100, H200, B200), or 8x80GB"
    )
    plan.add_argument("--processes", type=whole(1), metavar="N", help="with --gpus as many as GPUs, else 1")
    plan.add_argument("--json", type=json_file, metavar="FILE", help="write the plan as JSON too")
    add_flags(plan)
    plan.set_defaults(run=_plan)


def _plan(known: argparse.Namespace, console: Console) -> int:
    config = chosen_config(known.config, known.overrides)
    check_schemes(config)
    machine = this_machine() if known.gpus is None else parse_machine(known.gpus)
    processes = known.processes or (machine.count if known.gpus else 1)
    plan = make_plan(config, *sizes_of(config.model), machine, processes)
    lines = table(plan) if plan.fits else [*table(plan), *remedies(plan, known.overrides, known.config)]
    say(console, "\n".join(lines))
    write_json(known.json, as_data(plan))
    return 0 if plan.fits else DOES_NOT_FIT


def planned(
    config: RunConfig, processes: int | None, overrides: Mapping[str, str], file: str | None, console: Console
) -> RunConfig:
    """A run's configuration with what it leaves to the plan decided, before anything is loaded; the plan's sum is told.

    processes: as asked for, None where a launcher decides. overrides, file: of the command, for the one that works.
    Raises `SchemeError` for the name of none, `MemoryPlanError` for a run that is clearly too large for this machine,
    and `ConfigError` for more processes than GPUs. A model without a config.json is left to the checks of files.
    """
    check_schemes(config)
    try:
        shapes, source = sizes_of(config.model)
    except ModelError:
        return config
    except ConfigError as error:
        say(console, f"memory: not planned: {error}")
        return config
    world = processes or int(os.environ.get("WORLD_SIZE", "1"))
    here = processes or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    plan = make_plan(config, shapes, source, this_machine(), world, here)
    if plan.refused and os.environ.get("RANK", "0") == "0":
        lines = [f"{verdict(plan)} on {plan.machine.name}; nothing was loaded", *table(plan)]
        raise MemoryPlanError("\n".join([*lines, *remedies(plan, overrides, file)]))
    say(console, f"memory, planned: {one_line(plan)}")
    return plan.config
