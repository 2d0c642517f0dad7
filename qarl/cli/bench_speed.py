"""`qarl bench speed`: its options."""

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from qarl.cli.options import DTYPES, KERNELS, numbers, scheme_names, whole
from qarl.report.tables import PlainTable


def add_options(speed: argparse.ArgumentParser) -> None:
    """All of them."""
    speed.add_argument(
        "--schemes", type=scheme_names, default=(), help="comma-separated (default: all that run on this machine); "
        "bf16 comes first",
    )  # fmt: skip
    speed.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="compute dtype (default bfloat16)")
    speed.add_argument("--prompts", type=whole(1), default=2, help="of a training step (default 2)")
    speed.add_argument("--samples", type=whole(2), default=4, help="completions a prompt (default 4)")
    speed.add_argument("--prompt-tokens", type=whole(1), default=64, help="of each prompt (default 64)")
    speed.add_argument("--tokens", type=whole(1), default=128, help="of each completion (default 128)")
    speed.add_argument("--updates", type=whole(1), default=2, help="optimizer steps a batch (default 2)")
    speed.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="default adamw")
    speed.add_argument(
        "--model",
        default="150m",
        help="150m (default) or tiny, with random weights; an embedded name, a folder or a hub id",
    )
    speed.add_argument(
        "--batches",
        type=numbers("1,16", 1),
        default="1,4,16,64",
        help="sequences at once, comma-separated (default 1,4,16,64)",
    )
    speed.add_argument(
        "--contexts", type=numbers("64,256", 1), help="tokens before what is timed, comma-separated "
        "(default 64,256; on GPUs 512,4096)",
    )  # fmt: skip
    speed.add_argument("--decode-tokens", type=whole(4), default=16, help="decoded a sequence and cell (default 16)")
    speed.add_argument(
        "--steps", type=whole(1), default=2, help="timed training steps a process and learner (default 2)"
    )
    speed.add_argument("--rounds", type=whole(1), default=3, help="of all processes; medians are shown (default 3)")
    speed.add_argument("--kernel", choices=KERNELS, default="auto", help="the learner's kernel family (default auto)")
    speed.add_argument("--seed", type=whole(0), default=0, help="of weights and prompts (default 0)")


def measure(known: argparse.Namespace, console: Console) -> tuple[list[PlainTable], Any]:
    """Measure, and return the tables and the same JSON-ready."""
    import torch

    from qarl.bench.speed import measure as speed
    from qarl.bench.speed.table import tables

    options = {field.name: getattr(known, field.name) for field in dataclasses.fields(speed.Options)}
    options["contexts"] = known.contexts or ((512, 4096) if torch.cuda.is_available() else (64, 256))
    figures = speed.measure(speed.Options(**options), lambda line: console.print(line, highlight=False))
    return tables(figures), speed.as_data(figures)
