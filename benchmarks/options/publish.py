"""Options of `python -m benchmarks publish`."""

import argparse
from typing import Any

from rich.console import Console

from qarl.cli.options import DTYPES, whole
from qarl.configs.schemes import SCHEME_NAMES
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    publish = names.add_parser(
        "publish",
        help="materializing and publishing against memory-copy bandwidth, and memory",
    )
    publish.add_argument(
        "--scheme",
        choices=SCHEME_NAMES,
        metavar="SCHEME",
        default="w4a16",
        help="default w4a16",
    )
    publish.add_argument(
        "--parameters",
        type=float,
        default=1e9,
        help="of the random Qwen3-MoE (default 1e9)",
    )
    publish.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="compute dtype (default bfloat16)",
    )
    publish.add_argument(
        "--master-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="default bfloat16",
    )
    publish.add_argument(
        "--repeats",
        type=whole(1),
        default=7,
        help="rounds; medians are shown (default 7)",
    )
    return publish


def measure(known: argparse.Namespace, _console: Console) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks import publish

    figures = publish.measure(
        known.scheme, known.parameters, known.dtype, known.master_dtype, known.repeats
    )
    return publish.table(figures), publish.as_data(figures)
