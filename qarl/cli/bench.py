"""`qarl bench NAME`: the benchmarks' options. Each measures, prints a table, and writes the same as JSON if asked."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from qarl.cli.options import (
    DTYPES,
    check_json,
    dotted_overrides,
    refuse_rest,
    scheme_names,
    whole,
    words,
    write_json,
)
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
        "--json", metavar="FILE", help="write every figure as JSON too, with the command, commit, machine and versions"
    )

    def run(known: argparse.Namespace, rest: list[str], console: Console) -> int:
        if not fields:
            refuse_rest(rest)
        overrides = (dotted_overrides(known, rest),) if fields else ()
        check_json(known.json)
        from qarl.cli.environment import quiet_libraries

        quiet_libraries(getattr(known, "compile", False))
        shown, data, *status = measure(known, console, *overrides)
        for table in [shown] if isinstance(shown, PlainTable) else shown:
            table.show(console)
        if known.json:
            from qarl.bench.record import record

            write_json(known.json, record(known.arguments, data, program))
        return status[0] if status else 0

    parser.set_defaults(run=run)


def _add_mismatch(names: Any) -> None:
    mismatch = names.add_parser("mismatch", help="learner against sampler, per scheme and dtype")
    mismatch.add_argument(
        "--model",
        default="random-qwen3",
        help="folder, hub id, embedded name, or a tiny untrained model with a peaky output head: random-qwen3 "
        "(default), random-qwen3-moe, random-llama, random-mistral (windows) or random-gemma3",
    )
    mismatch.add_argument("--schemes", type=scheme_names, default="w4a16,w8a8,fp8", help="comma-separated")
    mismatch.add_argument("--dtypes", type=words(DTYPES), default="bfloat16,float16", help="comma-separated")
    mismatch.add_argument("--prompts", type=whole(1), default=32)
    mismatch.add_argument("--tokens", type=whole(1), default=64, help="sampled tokens a prompt")
    mismatch.add_argument(
        "--peak", type=float, help="factor on the output head (default 12 for the untrained models, else 1)"
    )
    mismatch.add_argument("--seed", type=whole(0), default=0)
    runs(mismatch, _mismatch)


def _mismatch(known: argparse.Namespace, _console: Console) -> Measured:
    from qarl.bench import mismatch

    rows = mismatch.run(known.model, known.schemes, known.dtypes, known.prompts, known.tokens, known.peak, known.seed)
    return mismatch.table(rows), mismatch.rows_as_data(rows)


def _add_speed(names: Any) -> None:
    from qarl.cli import bench_speed

    speed = names.add_parser(
        "speed",
        help="decoding, prefill and a whole training step per scheme, against bf16",
        description=(
            "Measure every scheme this machine runs: the engine's decoding and prefill, a whole training step with a "
            "plain learner and with QaRL."
        ),
    )
    bench_speed.add_options(speed)
    runs(speed, bench_speed.measure)
