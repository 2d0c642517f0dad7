"""Parts that the benchmarks' commands share: the `--json` option, and printing of the results."""

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
"""Result of a benchmark: table or tables to print, JSON-ready data, exit status (default 0)."""


def runs(
    parser: argparse.ArgumentParser,
    measure: Callable[..., Measured],
    fields: bool = False,
) -> None:
    """Add `--json` to the parser and make `measure(known, console)` its action.

    fields: accept every field of the configuration as an option too, and pass the overrides to
    `measure` as a third argument. If false, unknown options are refused.
    """
    parser.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write every figure as JSON too, with the command, commit, machine and versions",
    )

    def run(known: argparse.Namespace, console: Console) -> int:
        quiet_libraries(getattr(known, "compile", False))
        overrides = (known.overrides,) if fields else ()
        shown, data, *status = measure(known, console, *overrides)
        for table in [shown] if isinstance(shown, PlainTable) else shown:
            table.show(console)
        if known.json:
            from qarl.report.record import record

            write_json(known.json, record(known.arguments, data, PROGRAM))
        return status[0] if status else 0

    parser.set_defaults(run=run, fields=fields)
