"""`qarl bench`: what this machine makes of the schemes; `qarl bench speed` is its one member."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.job import SpeedOptions
from qarl.cli.environment import quiet_libraries
from qarl.cli.options import (
    DTYPES,
    json_file,
    numbers,
    say,
    scheme_names,
    whole,
    write_json,
)
from qarl.report.startup import phase, phases_shown_on

_BATCHES = "1,4,16"


def add_bench(commands: Any) -> None:
    """Add `qarl bench` to the commands."""
    words = "measure the schemes on this machine: `qarl bench speed`"
    bench = commands.add_parser(
        "bench", help=words, description="Measure the schemes on this machine."
    )
    names = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    _add_speed(names)


def _add_speed(names: Any) -> None:
    speed = names.add_parser(
        "speed",
        help="speed and memory of sampling and training per scheme, against bf16",
        description=(
            "Measure speed and memory of every scheme this machine runs, against bf16: decoding and"
            " prefill of the engine, the parts of the learner's step, publishing, and the whole"
            " step, with QaRL and with a 16-bit learner. Each scheme runs in a process of its own."
            " Prints tables and draws a picture."
        ),
    )
    speed.add_argument(
        "--model",
        metavar="MODEL",
        help=(
            "folder, hub id or embedded name (default: SmolLM2-135M-Instruct if it is in the cache,"
            " else tiny-qwen3)"
        ),
    )
    speed.add_argument(
        "--schemes",
        type=scheme_names,
        default=(),
        metavar="A,B",
        help="comma-separated; bf16 always comes first (default: all that run on this machine)",
    )
    speed.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="compute dtype (default bfloat16)",
    )
    _add_engine_options(speed.add_argument_group("engine"))
    _add_step_options(speed.add_argument_group("training step"))
    speed.add_argument(
        "--rounds",
        type=whole(1),
        default=3,
        metavar="N",
        help="times that every process runs; figures are medians over rounds (default 3)",
    )
    speed.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="of prompts and samples (default 0)",
    )
    speed.add_argument(
        "--picture",
        default="bench-speed.svg",
        metavar="FILE",
        help="SVG to draw (default bench-speed.svg)",
    )
    speed.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write every figure as JSON too, with the command, commit, machine and versions",
    )
    speed.set_defaults(run=_speed)


def _add_engine_options(group: Any) -> None:
    group.add_argument(
        "--batches",
        type=numbers("1,16", 1),
        default=numbers("1,16", 1)(_BATCHES),
        metavar="N,N",
        help=f"sequences sampled together (default {_BATCHES})",
    )
    group.add_argument(
        "--contexts",
        type=numbers("64,256", 1),
        default=(),
        metavar="N,N",
        help=(
            "tokens of a prompt (default 64,256; on GPUs 512,4096, as far as the model has"
            " positions)"
        ),
    )
    group.add_argument(
        "--decode-tokens",
        type=whole(4),
        default=16,
        metavar="N",
        help="tokens decoded after each prompt; more give steadier figures (default 16)",
    )


def _add_step_options(group: Any) -> None:
    group.add_argument(
        "--prompts",
        type=whole(1),
        default=2,
        metavar="N",
        help="prompts of a step (default 2)",
    )
    group.add_argument(
        "--samples",
        type=whole(2),
        default=4,
        metavar="N",
        help="completions of a prompt (default 4)",
    )
    group.add_argument(
        "--prompt-tokens",
        type=whole(1),
        default=64,
        metavar="N",
        help="of each prompt (default 64)",
    )
    group.add_argument(
        "--tokens",
        type=whole(1),
        default=128,
        metavar="N",
        help="of each completion (default 128)",
    )
    group.add_argument(
        "--updates",
        type=whole(1),
        default=2,
        metavar="N",
        help="optimizer steps of a step (default 2)",
    )
    group.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="default adamw"
    )
    group.add_argument(
        "--steps",
        type=whole(1),
        default=2,
        metavar="N",
        help="timed steps of each learner in each round (default 2)",
    )


def default_model() -> str:
    """Return the name of the real model if its folder is in the cache, else the embedded
    policy's.
    """
    from qarl.embedded.real_model import REAL_MODEL, real_model_folder

    return "tiny-qwen3" if real_model_folder() is None else REAL_MODEL


def _speed(known: argparse.Namespace, console: Console) -> int:
    from qarl.bench.picture import check_picture, speed_picture

    picture = Path(known.picture)
    check_picture(picture, "--picture")
    quiet_libraries()
    options = _options(known)
    with phases_shown_on(Console(stderr=True)):
        with phase("importing torch and transformers"):
            from qarl.bench.measure import as_data, check, measure
            from qarl.bench.tables import tables
            from qarl.report.record import record
        with phase("checking model and schemes"):
            plan = check(options)
    report = measure(plan, partial(say, console))
    for table in tables(report):
        say(console, "")
        table.show(console)
    picture.write_text(speed_picture(report), encoding="utf-8")
    write_json(known.json, record(known.arguments, as_data(report)) if known.json else None)
    say(console, f"wrote {' and '.join(filter(None, (str(picture), known.json)))}")
    return 0


def _options(known: argparse.Namespace) -> SpeedOptions:
    return SpeedOptions(
        model=known.model or default_model(),
        schemes=known.schemes,
        dtype=known.dtype,
        batches=known.batches,
        contexts=known.contexts,
        decode_tokens=known.decode_tokens,
        prompts=known.prompts,
        samples=known.samples,
        prompt_tokens=known.prompt_tokens,
        tokens=known.tokens,
        updates=known.updates,
        optimizer=known.optimizer,
        steps=known.steps,
        rounds=known.rounds,
        seed=known.seed,
    )
