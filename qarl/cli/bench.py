"""`qarl bench`: measure the schemes on this machine. `qarl bench speed` is the one benchmark."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.job import SpeedOptions
from qarl.cli.environment import quiet_libraries
from qarl.cli.options import (
    DTYPES,
    add_count,
    add_json,
    numbers,
    say,
    scheme_names,
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
    add_count(
        speed,
        "--rounds",
        "Number of times that every process runs; figures are medians over them.",
        3,
    )
    add_count(speed, "--seed", "Seed for prompts and samples.", 0, least=0)
    speed.add_argument(
        "--picture",
        default="bench-speed.svg",
        metavar="FILE",
        help="SVG file to draw. Default: bench-speed.svg.",
    )
    add_json(
        speed, "Write every figure as JSON too, with the command, commit, machine and versions."
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
    add_count(
        group,
        "--decode-tokens",
        "Tokens decoded after each prompt. Raise it for steadier figures.",
        16,
        least=4,
    )


def _add_step_options(group: Any) -> None:
    add_count(group, "--prompts", "Prompts per step.", 2)
    add_count(group, "--samples", "Completions per prompt.", 4, least=2)
    add_count(group, "--prompt-tokens", "Length of each prompt in tokens.", 64)
    add_count(group, "--tokens", "Length of each completion in tokens.", 128)
    add_count(group, "--updates", "Optimizer steps per step.", 2)
    group.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default="adamw",
        help="Optimizer of the learner. Default: adamw.",
    )
    add_count(group, "--steps", "Timed steps of each learner in each round.", 2)


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
    chosen = {field.name: getattr(known, field.name) for field in fields(SpeedOptions)}
    return SpeedOptions(**{**chosen, "model": known.model or default_model()})
