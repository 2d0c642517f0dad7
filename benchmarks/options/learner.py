"""Options of `python -m benchmarks learner`."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.command import KERNELS
from benchmarks.names import LEARNER_MODELS
from benchmarks.options.trl import add_trl, trl_settings
from qarl.cli.options import DTYPES, scheme_names, whole, words
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    learner = names.add_parser(
        "learner",
        help="a learner step per scheme: time, its split and memory, against bf16 and against TRL",
    )
    learner.add_argument(
        "--models",
        type=words(LEARNER_MODELS),
        default="tiny",
        help="comma-separated: tiny (default), 150m",
    )
    learner.add_argument(
        "--schemes",
        type=scheme_names,
        default="w4a16,w8a8",
        help="comma-separated (default w4a16,w8a8); bf16 comes first",
    )
    learner.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="compute dtype (default bfloat16); masters are float32",
    )
    add_trl(learner, "default,no-checkpointing")
    learner.add_argument(
        "--updates",
        type=whole(1),
        default=2,
        help="optimizer steps a batch (default 2)",
    )
    learner.add_argument(
        "--tokens",
        type=whole(2),
        help="of the median completion (default: the model's)",
    )
    learner.add_argument(
        "--micro-batch-tokens",
        type=whole(1),
        default=4096,
        help="padded tokens a forward (default 4096)",
    )
    learner.add_argument(
        "--steps", type=whole(1), default=2, help="timed steps a process (default 2)"
    )
    learner.add_argument(
        "--rounds",
        type=whole(1),
        default=3,
        help="of all processes; medians are shown (default 3)",
    )
    learner.add_argument(
        "--checkpointing",
        action="store_true",
        help="QaRL's schemes with learner.gradient_checkpointing, too",
    )
    learner.add_argument(
        "--compile",
        action="store_true",
        help="QaRL's schemes with learner.compile, too",
    )
    learner.add_argument(
        "--kernel", choices=KERNELS, default="auto", help="the learner's kernel family"
    )
    learner.add_argument(
        "--seed", type=whole(0), default=0, help="of weights and batch (default 0)"
    )
    return learner


def measure(known: argparse.Namespace, console: Console) -> tuple[PlainTable, Any]:
    """Run the benchmark and return its table and JSON-ready data."""
    from benchmarks.learner import measure as learner
    from benchmarks.learner import table as learner_table

    settings, python = trl_settings(known)
    options = learner.Options(
        models=known.models,
        schemes=known.schemes,
        dtype=known.dtype,
        trl=settings,
        trl_python=python,
        updates=known.updates,
        steps=known.steps,
        rounds=known.rounds,
        tokens=known.tokens,
        micro_batch_tokens=known.micro_batch_tokens,
        kernel=known.kernel,
        seed=known.seed,
        variants=tuple(variant for variant in learner.VARIANTS if getattr(known, variant)),
    )
    rows = learner.measure(options, lambda line: console.print(line, highlight=False))
    return learner_table.table(rows, known.dtype), learner.as_data(rows)
