"""What the benchmarks' commands share: types of options, and the end of each: its tables, and the
same as JSON.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, get_args

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import json_file, write_json
from qarl.configs.schema.learner import LearnerConfig
from qarl.report.tables import PlainTable

PROGRAM = "python -m benchmarks"
KERNELS = get_args(LearnerConfig.model_fields["kernel"].annotation)

Shown = PlainTable | Sequence[PlainTable]
Measured = tuple[Shown, Any] | tuple[Shown, Any, int]
"""What a benchmark returns: the table or tables for a person, the same JSON-ready, and an exit
status where it is not
0.
"""


def runs(
    parser: argparse.ArgumentParser,
    measure: Callable[..., Measured],
    fields: bool = False,
) -> None:
    """The parser's last lines: `--json`, and `measure(known, console)` as what runs.

    fields: every field of the configuration is an option too, and `measure` gets the overrides as a
    third argument; without it, unknown options are refused.
    """
    parser.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write every figure as JSON too, with the command, commit, machine and versions",
    )

    def run(known: argparse.Namespace, console: Console) -> int:
        quiet_libraries(getattr(known, "compile", False))
        shown, data, *status = measure(known, console, *((known.overrides,) if fields else ()))
        for table in [shown] if isinstance(shown, PlainTable) else shown:
            table.show(console)
        if known.json:
            from qarl.report.record import record

            write_json(known.json, record(known.arguments, data, PROGRAM))
        return status[0] if status else 0

    parser.set_defaults(run=run, fields=fields)
