"""Options of `python -m benchmarks delivery`."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.names import DELIVERY_SHAPES
from qarl.cli.options import scheme_names, whole
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "delivery",
        help="weight versions to a running vLLM server: whole, as deltas, and bf16 from disk",
        description=(
            "Time and bytes of a publish to a vLLM server, and how long it pauses "
            "(docs/explain/publish.md#deltas)."
        ),
    )
    parser.add_argument(
        "--shape",
        choices=DELIVERY_SHAPES,
        default="0.6b",
        help="of a random Qwen3 (default 0.6b)",
    )
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="w4a16,w8a8",
        help="comma-separated (default w4a16,w8a8)",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=1e-6,
        help="of the step between two versions (default 1e-6)",
    )
    parser.add_argument(
        "--rounds", type=whole(1), default=5, help="of a publish each way (default 5)"
    )
    parser.add_argument(
        "--transfer",
        default="files",
        choices=("files", "http"),
        help="as rollout.server_transfer",
    )
    parser.add_argument("--folder", help="where versions are written (default: memory, /dev/shm)")
    return parser


def measure(known: argparse.Namespace, console: Console) -> tuple[list[PlainTable], Any]:
    """Run the benchmark and return its tables and JSON-ready data."""
    from benchmarks import delivery

    data = delivery.measure(
        known.shape,
        known.schemes,
        known.lr,
        known.rounds,
        known.folder,
        known.transfer,
        lambda line: console.print(line, highlight=False),
    )
    return delivery.table(data), data
