"""`qarl bench launches`: its options."""

import argparse
from typing import Any

from rich.console import Console

from qarl.bench.names import LAUNCHES_MODELS
from qarl.cli.options import scheme_names, words
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """The benchmark's parser."""
    parser = names.add_parser(
        "launches",
        help="kernels, waits and bytes of a learner step on a GPU, counted without one",
        description=(
            "Count what a learner step of a real model's shape asks of a GPU, on tensors without values: kernels, "
            "waits of the host for the device, bytes read and written (docs/cuda.md)."
        ),
    )
    parser.add_argument(
        "--models", type=words(LAUNCHES_MODELS), default="qwen3-1.7b,qwen3-30b-a3b", help="comma-separated: "
        "qwen3-1.7b, qwen3-30b-a3b (default both)",
    )  # fmt: skip
    parser.add_argument(
        "--schemes", type=scheme_names, default="w4a16,w8a8", help="comma-separated (default w4a16,w8a8)"
    )
    return parser


def measure(known: argparse.Namespace, console: Console) -> tuple[PlainTable, Any]:
    """What `known` asks for, as a table and JSON-ready."""
    from qarl.bench.launches import measure as launches

    rows = launches.measure(known.models, known.schemes)
    return launches.table(rows), launches.as_data(rows)
