"""`qarl doctor --machine`: what this machine has of all that a run needs, each line ok or its remedy."""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import check_json, refuse_rest, write_json


def add_doctor(commands: Any) -> None:
    """Add `qarl doctor` to the commands."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has of all that a run needs, and what to do where something is missing",
        description="Driver, GPUs, memory, disk, compiler, vLLM's operators and every scheme's kernel: one line each. "
        "Exit status 1 where something needs a remedy.",
    )
    doctor.add_argument("--machine", action="store_true", required=True, help="look at the machine; no model is needed")
    doctor.add_argument("--json", metavar="FILE", help="write the lines as JSON too")
    doctor.set_defaults(run=_doctor)


def _doctor(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    refuse_rest(rest)
    check_json(known.json)
    quiet_libraries()
    from qarl.doctor.machine import as_data, machine_lines

    lines = []
    for line in machine_lines():
        state = f"{line.text}\n{'':<8}-> {line.remedy}" if line.remedy else line.text
        mark = "remedy" if line.remedy else "ok"
        console.print(f"{mark:<8}{line.name}: {state}", markup=False, highlight=False, soft_wrap=True)
        lines.append(line)
    wanting = sum(bool(line.remedy) for line in lines)
    console.print(f"{wanting} of {len(lines)} need a remedy" if wanting else "all well", highlight=False)
    write_json(known.json, as_data(lines))
    return 1 if wanting else 0
