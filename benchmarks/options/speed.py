"""`python -m benchmarks speed`: its options."""

import argparse
import dataclasses
from typing import Any

from rich.console import Console

from benchmarks.command import KERNELS, Measured, scheme_names
from qarl.cli.options import DTYPES, numbers, say, whole


def add_options(names: Any) -> argparse.ArgumentParser:
    """The benchmark's parser."""
    speed = names.add_parser(
        "speed",
        help="decoding, prefill and a whole training step per scheme, against bf16",
        description="Measure every scheme this machine runs: the engine's decoding and prefill, a whole training step "
        "with a plain learner and with QaRL.",
    )
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
    return speed


def measure(known: argparse.Namespace, console: Console) -> Measured:
    """What `known` asks for, as tables and JSON-ready."""
    import torch

    from benchmarks.speed import measure as speed
    from benchmarks.speed.table import tables

    options = {field.name: getattr(known, field.name) for field in dataclasses.fields(speed.Options)}
    options["contexts"] = known.contexts or ((512, 4096) if torch.cuda.is_available() else (64, 256))
    figures = speed.measure(speed.Options(**options), lambda line: say(console, line))
    return tables(figures), speed.as_data(figures)
