"""Options of `python -m benchmarks mismatch`."""

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from benchmarks.command import Measured
from qarl.cli.options import DTYPES, scheme_names, whole, words


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    mismatch = names.add_parser("mismatch", help="learner against sampler, per scheme and dtype")
    mismatch.add_argument(
        "--model",
        default="tiny-qwen3",
        help="folder, hub id or embedded name (default tiny-qwen3)",
    )
    mismatch.add_argument(
        "--schemes", type=scheme_names, default="w4a16,w8a8,fp8", help="comma-separated"
    )
    mismatch.add_argument(
        "--dtypes",
        type=words(DTYPES),
        default="bfloat16,float16",
        help="comma-separated",
    )
    mismatch.add_argument("--prompts", type=whole(1), default=32)
    mismatch.add_argument("--tokens", type=whole(1), default=64, help="sampled tokens a prompt")
    mismatch.add_argument("--seed", type=whole(0), default=0)
    return mismatch


def measure(known: argparse.Namespace, _console: Console) -> Measured:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks import mismatch

    rows = mismatch.measure(
        known.model,
        known.schemes,
        known.dtypes,
        known.prompts,
        known.tokens,
        known.seed,
    )
    return mismatch.table(rows), [dataclasses.asdict(row) for row in rows]
