"""Options of `python -m benchmarks delta`."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.names import DELTA_SHAPES, OPTIMIZERS
from qarl.cli.options import scheme_names, split, words
from qarl.configs.errors import ConfigError
from qarl.configs.load import load_config
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "delta",
        help="how many codes and scales a step changes, and the bytes of a delta publish",
        description=(
            "Step random matrices of a model's shapes as a run would, and count what changes of"
            " their low-bit version (docs/explain/publish.md#deltas)."
        ),
    )
    parser.add_argument(
        "--shapes",
        type=words(DELTA_SHAPES),
        default="150m,1b-moe",
        help="comma-separated: 150m, 1b-moe (default both)",
    )
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="w4a16,w4a16-channel,w8a8,fp8",
        help="comma-separated (default w4a16,w4a16-channel,w8a8,fp8)",
    )
    parser.add_argument(
        "--optimizers",
        type=words(OPTIMIZERS),
        default="adamw,muon",
        help="comma-separated: adamw, muon (default both)",
    )
    parser.add_argument(
        "--lrs",
        type=_rates,
        default="1e-6,3e-6,1e-5",
        help="comma-separated (default 1e-6,3e-6,1e-5)",
    )
    return parser


def measure(known: argparse.Namespace, _console: Console) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks import delta

    changes = delta.measure(known.shapes, known.schemes, known.optimizers, known.lrs)
    return delta.table(changes), delta.as_data(changes)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(rate) for rate in split(text)]
        for rate in rates:
            # raises if the rate is no valid learning rate
            load_config(None, {"learner.optimizer.lr": str(rate)})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    except ValueError:
        rates = []
    if not rates:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be learning rates with commas between, such as 1e-6,3e-6"
        )
    return rates
