"""Options of `python -m benchmarks soak`."""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.options import whole
from qarl.configs.schemes import SCHEME_NAMES
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "soak",
        help="a long run on a server: does memory grow?",
        description=(
            "Memory of learner and server over many steps and publishes"
            " (docs/lab/servers-measured.md)."
        ),
    )
    parser.add_argument(
        "--steps",
        type=whole(40),
        default=500,
        help=(
            "of the run, each with a publish; 40 or more, "
            "of which 20 parts are compared (default 500)"
        ),
    )
    parser.add_argument("--prompts", type=whole(1), default=8, help="of a step (default 8)")
    parser.add_argument("--samples", type=whole(1), default=4, help="of a prompt (default 4)")
    parser.add_argument(
        "--scheme",
        choices=SCHEME_NAMES,
        metavar="SCHEME",
        default="w4a16",
        help="default w4a16",
    )
    return parser


def measure(known: argparse.Namespace, console: Console) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks import soak

    data = soak.measure(
        known.steps,
        known.prompts,
        known.samples,
        known.scheme,
        lambda line: console.print(line, highlight=False),
    )
    return soak.table(data), data
