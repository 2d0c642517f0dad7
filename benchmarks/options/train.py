"""Options of `python -m benchmarks train`, and the trainings that they describe."""

import argparse
from typing import Any

from rich.console import Console

from benchmarks.options.trl import add_trl, trl_settings
from qarl.cli.options import scheme_names, seeds, split, whole
from qarl.report.tables import PlainTable


def add_options(names: Any) -> argparse.ArgumentParser:
    """Add the benchmark's parser to `names` and return it."""
    parser = names.add_parser(
        "train",
        help=(
            "a whole training against TRL's: wall time, CPU time and completions to each held-out"
            " accuracy"
        ),
        description=(
            "Train from the same policy on the same problems, QaRL in each scheme and TRL's"
            " GRPOTrainer with its own generation, each in a process of its own"
            " (docs/lab/bench-train.md). Every field of a configuration is an option by its dotted"
            " name; TRL takes over model, task, rollout, steps, mini-batches."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--schemes",
        type=scheme_names,
        default="bf16,w4a16",
        help="comma-separated (default bf16,w4a16)",
    )
    parser.add_argument("--seeds", type=seeds, default="0", help="comma-separated (default 0)")
    add_trl(parser, "default,fp32")
    parser.add_argument(
        "--trl-lr",
        type=float,
        metavar="RATE",
        help="learning rate of TRL's AdamW (default 2e-4)",
    )
    parser.add_argument(
        "--every",
        type=whole(1),
        default=5,
        help="steps between evaluations (default 5)",
    )
    parser.add_argument(
        "--targets",
        type=_targets,
        default="50,60,70",
        help="held-out accuracies, percent (default 50,60,70)",
    )
    parser.add_argument(
        "--plot",
        metavar="NAME",
        help="draw the curves of the first seed as NAME.svg and NAME.png",
    )
    return parser


def measure(
    known: argparse.Namespace, console: Console, overrides: dict[str, str]
) -> tuple[PlainTable, Any]:
    """Train, draw the curves if `--plot` is set, and return the table and JSON-ready data."""
    settings, python = trl_settings(known, "trl_lr")
    from benchmarks.plots import plot_stem
    from benchmarks.train import measure as training
    from benchmarks.train import table as shown

    options = training.TrainOptions(
        schemes=known.schemes,
        seeds=known.seeds,
        trl=settings,
        trl_python=python,
        trl_lr=2e-4 if known.trl_lr is None else known.trl_lr,
        every=known.every,
        targets=known.targets,
        overrides=overrides,
    )
    picture = plot_stem("--plot", known.plot) if known.plot else None
    trainings = training.measure(options, lambda line: console.print(line, highlight=False))
    if picture:
        console.print(
            f"drew {', '.join(map(str, shown.plot(trainings, picture)))}",
            soft_wrap=True,
        )
    return shown.table(trainings, options.targets), training.as_data(trainings, options)


def _targets(text: str) -> tuple[float, ...]:
    try:
        targets = tuple(float(target) / 100 for target in split(text))
    except ValueError:
        targets = ()
    if not targets or not all(0 < target < 1 for target in targets):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be percentages between 0 and 100 with commas between, such as 50,60,70"
        )
    return targets
