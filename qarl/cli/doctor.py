"""`qarl doctor`: what `qarl check` looks at, then known pitfalls of training, looked for in one batch that a
configuration samples; with `--machine`, what this machine has of all that a run needs, each line ok or its remedy."""

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from qarl.cli.check import checked, show
from qarl.cli.environment import quiet_libraries
from qarl.cli.help import add_flags
from qarl.cli.mismatch import investigated, mismatch_config
from qarl.cli.options import check_json, dotted_overrides, write_json
from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.configs.schema.run import RunConfig


def add_doctor(commands: Any) -> None:
    """Add `qarl doctor` to the commands."""
    doctor = commands.add_parser(
        "doctor",
        help="known pitfalls, tested on a batch of a configuration's; --machine: what the machine has and lacks",
        usage="qarl doctor [CONFIG] [OPTIONS] [--ANY.FIELD VALUE …]\n       qarl doctor --machine",
        description="`qarl check`, then sample a configuration's prompts once, and test on them that learner and "
        "sampler are one policy: ratios, dtypes, temperature, positions, end tokens, seeds and more "
        "(docs/mismatch.md). Options are those of qarl train. With --machine instead: driver, GPUs, memory, disk, "
        "compiler, vLLM's operators and every scheme's kernel, one line each. Exit status 1 where something needs a "
        "remedy.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "config", nargs="?", metavar="CONFIG", help="YAML file, or a shipped name; default: as `qarl train`"
    )
    doctor.add_argument("--machine", action="store_true", help="look at the machine; no model is needed")
    doctor.add_argument("--json", metavar="FILE", help="write the lines as JSON too")
    add_flags(doctor, FLAGS)
    doctor.set_defaults(run=_doctor)


def _doctor(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    overrides = dotted_overrides(known, rest)
    if known.machine and (known.config or overrides):
        given = known.config or f"--{next(iter(overrides))}"
        raise ConfigError(f"{given} with --machine, which looks at the machine alone; leave one of them out")
    check_json(known.json)
    if known.machine:
        return _machine(known.json, console)
    return _training(mismatch_config(known.config, overrides), known.json, console)


def _machine(json: str | None, console: Console) -> int:
    quiet_libraries()
    from qarl.doctor.machine import as_data, machine_lines

    lines = []
    for line in machine_lines():
        _show(console, line.name, line.text, line.remedy)
        lines.append(line)
    wanting = sum(bool(line.remedy) for line in lines)
    console.print(f"{wanting} of {len(lines)} need a remedy" if wanting else "all well", highlight=False)
    write_json(json, as_data(lines))
    return 1 if wanting else 0


def _training(config: RunConfig, json: str | None, console: Console) -> int:
    findings = checked(config, console, new=False)
    warnings = show(findings, console)
    found = investigated(config, console)
    from qarl.run.pitfalls import CHECKS

    for pitfall in found.pitfalls:
        _show(console, pitfall.name, pitfall.size, pitfall.remedy)
    wanting = len(found.pitfalls)
    tested = f"{len(CHECKS)} tests on {int(found.batch.response_mask.sum()):,} tokens"
    said = ", ".join([f"{warnings} warnings of the check"] * bool(warnings) + [f"{wanting} pitfalls, in {tested}"])
    console.print(said if warnings or wanting else f"all well: {tested}", highlight=False)
    parts = {"check": [finding for finding in findings if finding.warning], "pitfalls": found.pitfalls}
    write_json(json, {name: [dataclasses.asdict(each) for each in part] for name, part in parts.items()})
    return 1 if warnings or wanting else 0


def _show(console: Console, name: str, text: str, remedy: str | None) -> None:
    state = f"{text}\n{'':<8}-> {remedy}" if remedy else text
    console.print(f"{'remedy' if remedy else 'ok':<8}{name}: {state}", markup=False, highlight=False, soft_wrap=True)
