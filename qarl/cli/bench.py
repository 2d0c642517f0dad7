"""`qarl bench`: measure the schemes on this machine. `qarl bench speed` is the one benchmark."""

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
    words = "Measure the schemes on this machine: `qarl bench speed`."
    bench = commands.add_parser(
        "bench", help=words, description="Measure the schemes on this machine."
    )
    names = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    _add_speed(names)


def _add_speed(names: Any) -> None:
    speed = names.add_parser(
        "speed",
        help="Measure speed and memory of sampling and training per scheme, against bf16.",
        description=(
            "Measure speed and memory of every scheme that this machine runs, against bf16:"
            " decoding and prefill of the engine, the parts of the learner's step, publishing, and"
            " the whole step, with QaRL and with a 16-bit learner. Each scheme runs in its own"
            " process. The command prints tables and draws a picture."
        ),
    )
    speed.add_argument(
        "--model",
        metavar="MODEL",
        help=(
            "Folder, hub id or embedded name. Default: SmolLM2-135M-Instruct if it is in the"
            " cache, else tiny-qwen3."
        ),
    )
    speed.add_argument(
        "--schemes",
        type=scheme_names,
        default=(),
        metavar="A,B",
        help=(
            "Schemes to measure, after bf16, which always comes first. Default: all that run on"
            " this machine."
        ),
    )
    speed.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="Compute dtype. Default: bfloat16.",
    )
    _add_engine_options(speed.add_argument_group("engine"))
    _add_step_options(speed.add_argument_group("training step"))
    speed.add_argument(
        "--rounds",
        type=whole(1),
        default=3,
        metavar="N",
        help="Number of times that every process runs; figures are medians over them. Default: 3.",
    )
    speed.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="Seed for prompts and samples. Default: 0.",
    )
    speed.add_argument(
        "--picture",
        default="bench-speed.svg",
        metavar="FILE",
        help="SVG file to draw. Default: bench-speed.svg.",
    )
    speed.add_argument(
        "--json",
        type=json_file,
        metavar="FILE",
        help="Write every figure as JSON too, with the command, commit, machine and versions.",
    )
    speed.set_defaults(run=_speed)


def _add_engine_options(group: Any) -> None:
    group.add_argument(
        "--batches",
        type=numbers("1,16", 1),
        default=numbers("1,16", 1)(_BATCHES),
        metavar="N,N",
        help=f"Numbers of sequences sampled together. Default: {_BATCHES}.",
    )
    group.add_argument(
        "--contexts",
        type=numbers("64,256", 1),
        default=(),
        metavar="N,N",
        help=(
            "Prompt lengths in tokens. Default: 64,256, and on GPUs 512,4096 as far as the model"
            " has positions."
        ),
    )
    group.add_argument(
        "--decode-tokens",
        type=whole(4),
        default=16,
        metavar="N",
        help="Tokens decoded after each prompt. Raise it for steadier figures. Default: 16.",
    )


def _add_step_options(group: Any) -> None:
    group.add_argument(
        "--prompts",
        type=whole(1),
        default=2,
        metavar="N",
        help="Prompts per step. Default: 2.",
    )
    group.add_argument(
        "--samples",
        type=whole(2),
        default=4,
        metavar="N",
        help="Completions per prompt. Default: 4.",
    )
    group.add_argument(
        "--prompt-tokens",
        type=whole(1),
        default=64,
        metavar="N",
        help="Length of each prompt in tokens. Default: 64.",
    )
    group.add_argument(
        "--tokens",
        type=whole(1),
        default=128,
        metavar="N",
        help="Length of each completion in tokens. Default: 128.",
    )
    group.add_argument(
        "--updates",
        type=whole(1),
        default=2,
        metavar="N",
        help="Optimizer steps per step. Default: 2.",
    )
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="Optimizer of the learner. Default: adamw.",
    )
    group.add_argument(
        "--steps",
        type=whole(1),
        default=2,
        metavar="N",
        help="Timed steps of each learner in each round. Default: 2.",
    )


def default_model() -> str:
    """Return the name of the real model if its folder is in the cache, otherwise that of the
    embedded policy.
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
