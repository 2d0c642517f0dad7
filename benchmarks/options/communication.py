"""Options of `python -m benchmarks communication`."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.names import OPTIMIZERS
from qarl.cli.options import numbers, scheme_names, words
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "communication",
        help="bytes that learner processes send in a step",
        description=(
            "Count what several learner processes on this machine send in a step of two updates,"
            " over the bytes of the fp32 masters (docs/guide/processes.md)."
        ),
    )
    parser.add_argument(
        "--processes",
        type=numbers("2,4", 2),
        default="2,4",
        help="comma-separated (default 2,4)",
    )
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="w4a16",
        help="comma-separated (default w4a16)",
    )
    parser.add_argument(
        "--optimizers",
        type=words(OPTIMIZERS),
        default="adamw,muon",
        help="comma-separated: adamw, muon (default both)",
    )
    parser.add_argument(
        "--moe",
        action="store_true",
        help="of a mixture of experts, its codes kept and gathered",
    )
    return parser


def measure(known: argparse.Namespace, console: Console) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks import communication

    rows = communication.measure(
        schemes=known.schemes,
        processes=known.processes,
        optimizers=known.optimizers,
        moe=known.moe,
        say=lambda line: console.print(line, highlight=False),
    )
    return communication.table(rows), communication.as_data(rows)
