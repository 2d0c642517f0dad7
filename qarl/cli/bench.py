"""`qarl bench NAME`: the benchmarks' options. Each measures, prints a table, and writes the same as JSON if asked."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import DTYPES, KERNELS, json_file, numbers, say, scheme_names, whole, words, write_json
from qarl.report.tables import PlainTable

Shown = PlainTable | Sequence[PlainTable]
Measured = tuple[Shown, Any] | tuple[Shown, Any, int]
"""What a benchmark returns: the table or tables for a person, the same JSON-ready, and an exit status where it is not
0."""


def add_bench(commands: Any) -> None:
    """Add `qarl bench` to the commands. A benchmark's modules are imported when it runs."""
    bench = commands.add_parser("bench", help="benchmarks")
    names = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    _add_mismatch(names)
    _add_speed(names)


def runs(
    parser: argparse.ArgumentParser, measure: Callable[..., Measured], fields: bool = False, program: str = "qarl"
) -> None:
    """The parser's last lines: `--json`, and `measure(known, console)` as what runs.

    fields: every field of the configuration is an option too, and `measure` gets the overrides as a third argument;
    without it, unknown options are refused. program: what the record's command begins with.
    """
    parser.add_argument(
        "--json", type=json_file, metavar="FILE", help="write every figure as JSON too, with the command, commit, "
        "machine and versions",
    )  # fmt: skip

    def run(known: argparse.Namespace, console: Console) -> int:
        quiet_libraries(getattr(known, "compile", False))
        shown, data, *status = measure(known, console, *((known.overrides,) if fields else ()))
        for table in [shown] if isinstance(shown, PlainTable) else shown:
            table.show(console)
        if known.json:
            from qarl.bench.record import record

            write_json(known.json, record(known.arguments, data, program))
        return status[0] if status else 0

    parser.set_defaults(run=run, fields=fields)


def _add_mismatch(names: Any) -> None:
    mismatch = names.add_parser("mismatch", help="learner against sampler, per scheme and dtype")
    mismatch.add_argument("--model", default="tiny-qwen3", help="folder, hub id or embedded name (default tiny-qwen3)")
    mismatch.add_argument("--schemes", type=scheme_names, default="w4a16,w8a8,fp8", help="comma-separated")
    mismatch.add_argument("--dtypes", type=words(DTYPES), default="bfloat16,float16", help="comma-separated")
    mismatch.add_argument("--prompts", type=whole(1), default=32)
    mismatch.add_argument("--tokens", type=whole(1), default=64, help="sampled tokens a prompt")
    mismatch.add_argument("--seed", type=whole(0), default=0)
    runs(mismatch, _mismatch)


def _mismatch(known: argparse.Namespace, _console: Console) -> Measured:
    from qarl.bench.mismatch import measure, table

    rows = measure(known.model, known.schemes, known.dtypes, known.prompts, known.tokens, known.seed)
    return table(rows), [dataclasses.asdict(row) for row in rows]


def _add_speed(names: Any) -> None:
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
    runs(speed, _speed)


def _speed(known: argparse.Namespace, console: Console) -> Measured:
    import torch

    from qarl.bench.speed import measure as speed
    from qarl.bench.speed.table import tables

    options = {field.name: getattr(known, field.name) for field in dataclasses.fields(speed.Options)}
    options["contexts"] = known.contexts or ((512, 4096) if torch.cuda.is_available() else (64, 256))
    figures = speed.measure(speed.Options(**options), lambda line: say(console, line))
    return tables(figures), speed.as_data(figures)
