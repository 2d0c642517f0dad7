"""Options of `python -m benchmarks precision`."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.command import KERNELS
from benchmarks.names import OPTIMIZERS
from qarl.cli.options import DTYPES, whole
from qarl.configs.schemes import SCHEME_NAMES
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    precision = names.add_parser(
        "precision",
        help="what masters of each precision keep of updates at a small learning rate",
    )
    precision.add_argument(
        "--scheme",
        choices=SCHEME_NAMES,
        metavar="SCHEME",
        default="w4a16",
        help="default w4a16",
    )
    precision.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="compute dtype (default bfloat16)",
    )
    precision.add_argument(
        "--steps", type=whole(2), default=14, help="of two updates each (default 14)"
    )
    precision.add_argument("--lr", type=float, default=1e-6, help="learning rate (default 1e-6)")
    precision.add_argument("--optimizer", default="muon", choices=OPTIMIZERS, help="default muon")
    precision.add_argument(
        "--kernel", choices=KERNELS, default="auto", help="the learner's kernel family"
    )
    precision.add_argument(
        "--seed", type=whole(0), default=0, help="of weights and batches (default 0)"
    )
    return precision


def measure(known: argparse.Namespace, _console: Console) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks import precision

    options = precision.PrecisionOptions(
        known.scheme,
        known.dtype,
        known.steps,
        known.lr,
        known.optimizer,
        known.kernel,
        known.seed,
    )
    rows = precision.measure(options)
    return precision.table(rows, options), precision.as_data(rows)
