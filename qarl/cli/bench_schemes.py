"""`qarl bench schemes`: its options, and from them to the grid."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.names import LEARNERS, METHODS, OBJECTIVES
from qarl.cli.options import scheme_names, seeds, split, whole, words
from qarl.configs.load import choice_sections
from qarl.report.plots import plot_stem
from qarl.report.tables import PlainTable


def add_schemes(names: Any) -> argparse.ArgumentParser:
    """Add it to the benchmarks."""
    parser = names.add_parser(
        "schemes",
        help="what is deployed per scheme, learner (unquantized, plain, aligned), objective and seed",
        description=(
            "Train every combination, deploy it, and compare held-out accuracy in a fresh engine, and training. "
            "Each run is a process of its own and is kept: the same command goes on where it stopped. A run that fails "
            "is shown, the rest goes on, and the exit status is 1. Every field of the configuration is an option by "
            "its dotted name, as in qarl train."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--schemes", type=scheme_names, default="w4a16,w8a8", help="comma-separated low-bit schemes (default "
        "w4a16,w8a8)",
    )  # fmt: skip
    parser.add_argument(
        "--learners", type=words(LEARNERS), default=",".join(LEARNERS), help="comma-separated (default all "
        "three): unquantized, in bf16; plain, a 16-bit learner with a quantized sampler; aligned, QaRL",
    )  # fmt: skip
    parser.add_argument(
        "--objectives", type=_objectives, default="tbpo,grpo", help="comma-separated, each NAME or NAME+CORRECTION "
        "(default tbpo,grpo)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=seeds, default="0,1,2", help="comma-separated (default 0,1,2)")
    parser.add_argument(
        "--ptq", type=words(METHODS), default=(), help="comma-separated methods that quantize the unquantized "
        "runs, such as rtn,gptq (default none)",
    )  # fmt: skip
    parser.add_argument(
        "--avg", type=whole(0), default=4, metavar="K", help="answers a problem for the sampled accuracy, "
        "avg@K (default 4; 0 leaves it out)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.6, help="of those answers (default 0.6, the paper's)")
    parser.add_argument(
        "--workers", type=whole(1), default=1, help="runs at a time, a CPU core or a GPU each (default 1)"
    )
    parser.add_argument(
        "--skip-unsupported", action="store_true", help="leave out schemes this machine cannot run, which are refused "
        "otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--runs", default="runs/bench-schemes", metavar="FOLDER", help="of the runs (default runs/bench-schemes)"
    )
    parser.add_argument("--plot", metavar="NAME", help="draw accuracies and curves as NAME.svg and NAME.png")
    return parser


def _objectives(text: str) -> tuple[str, ...]:
    """Names, each alone or with a correction after a plus sign."""
    known = OBJECTIVES, tuple(name for part in choice_sections()["learner.correction"] for name in part.names())
    for item in split(text):
        for word, names in zip(item.split("+", 1), known, strict=False):
            words(names)(word)
    return split(text)


def schemes(known: argparse.Namespace, console: Console, overrides: dict[str, str]) -> tuple[PlainTable, Any, int]:
    """Train what is missing, deploy, and return the table, the same JSON-ready and the exit status."""
    picture = plot_stem("--plot", known.plot) if known.plot else None
    from qarl.bench.schemes.command import run
    from qarl.bench.schemes.grid import Grid

    grid = Grid(
        runs=Path(known.runs), schemes=known.schemes, learners=known.learners, objectives=known.objectives,
        seeds=known.seeds, methods=known.ptq, samples=known.avg, temperature=known.temperature,
        skip_unsupported=known.skip_unsupported, overrides=overrides,
    )  # fmt: skip
    from qarl.cli.schemes import scheme_rows

    rows = scheme_rows(overrides.get("model", "tiny-qwen3"), overrides.get("dtype", "bfloat16"))
    reasons = {row.name: row.shape_reason or row.engine_reason or row.learner_reason for row in rows}
    unsupported = {name: reason for name, reason in reasons.items() if reason}
    return run(grid, unsupported, known.workers, picture, console)
