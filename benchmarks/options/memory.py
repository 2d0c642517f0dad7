"""Options of `python -m benchmarks memory`."""

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from benchmarks.names import MEMORY_MODELS
from qarl.cli.options import scheme_names, words
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "memory",
        help="the memory that `qarl plan` predicts against the peaks of real runs",
        description=(
            "Train random models for one step of two updates, a process each, and compare its peak"
            " with the plan's sum. Every field of the configuration is an option by its dotted"
            " name, as in qarl train."
        ),
    )
    parser.add_argument(
        "--models",
        type=words(MEMORY_MODELS),
        default="40m,150m,70m-moe",
        help="comma-separated, also 1b-moe (default 40m,150m,70m-moe)",
    )
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="bf16,w4a16,w8a8",
        help="comma-separated (default bf16,w4a16,w8a8)",
    )
    return parser


def measure(
    known: argparse.Namespace, console: Console, fields: dict[str, str]
) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data.

    fields: settings of the configuration, by dotted path.
    """
    from benchmarks import memory

    rows = memory.measure(
        known.models, known.schemes, partial(console.print, highlight=False), fields
    )
    return memory.table(rows), memory.as_data(rows)
