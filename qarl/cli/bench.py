"""`qarl bench NAME`: the benchmarks' options. Each measures, prints a table, and writes the same as JSON if asked."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from qarl.bench.names import LEARNER_MODELS, OPTIMIZERS
from qarl.cli.bench_train import add_train, train
from qarl.cli.bench_trl import add_trl, trl_settings
from qarl.cli.options import (
    DTYPES,
    KERNELS,
    check_json,
    dotted_overrides,
    refuse_rest,
    scheme_names,
    whole,
    words,
    write_json,
)
from qarl.configs.scheme_names import SCHEME_NAMES
from qarl.report.tables import PlainTable

_Shown = PlainTable | Sequence[PlainTable]
_Measured = tuple[_Shown, Any] | tuple[_Shown, Any, int]
"""What a benchmark returns: the table or tables for a person, the same JSON-ready, and an exit status where it is not
0."""


def add_bench(commands: Any) -> None:
    """Add `qarl bench` to the commands. A benchmark's modules are imported when it runs."""
    bench = commands.add_parser("bench", help="benchmarks")
    names = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    benchmarks = (
        _add_mismatch, _add_precision, _add_publish, _add_learner, _add_train, _add_speed, _add_others,
    )  # fmt: skip
    for add in benchmarks:
        add(names)


def _runs(parser: argparse.ArgumentParser, measure: Callable[..., _Measured], fields: bool = False) -> None:
    """The parser's last lines: `--json`, and `measure(known, console)` as what runs.

    fields: every field of the configuration is an option too, and `measure` gets the overrides as a third argument;
    without it, unknown options are refused.
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

            write_json(known.json, record(known.arguments, data))
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
    _runs(mismatch, _mismatch)


def _mismatch(known: argparse.Namespace, _console: Console) -> _Measured:
    from qarl.bench import mismatch

    rows = mismatch.run(known.model, known.schemes, known.dtypes, known.prompts, known.tokens, known.peak, known.seed)
    return mismatch.table(rows), mismatch.rows_as_data(rows)


def _add_precision(names: Any) -> None:
    precision = names.add_parser(
        "precision", help="what masters of each precision keep of updates at a small learning rate"
    )
    precision.add_argument("--scheme", choices=SCHEME_NAMES, metavar="SCHEME", default="w4a16", help="default w4a16")
    precision.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="compute dtype (default bfloat16)")
    precision.add_argument("--steps", type=whole(2), default=14, help="of two updates each (default 14)")
    precision.add_argument("--lr", type=float, default=1e-6, help="learning rate (default 1e-6)")
    precision.add_argument("--optimizer", default="muon", choices=OPTIMIZERS, help="default muon")
    precision.add_argument("--kernel", choices=KERNELS, default="auto", help="the learner's kernel family")
    precision.add_argument("--seed", type=whole(0), default=0, help="of weights and batches (default 0)")
    _runs(precision, _precision)


def _precision(known: argparse.Namespace, _console: Console) -> _Measured:
    from qarl.bench import precision

    options = precision.PrecisionOptions(
        known.scheme, known.dtype, known.steps, known.lr, known.optimizer, known.kernel, known.seed
    )
    rows = precision.measure(options)
    return precision.table(rows, options), precision.as_data(rows)


def _add_publish(names: Any) -> None:
    publish = names.add_parser("publish", help="materializing and publishing against memory-copy bandwidth, and memory")
    publish.add_argument("--scheme", choices=SCHEME_NAMES, metavar="SCHEME", default="w4a16", help="default w4a16")
    publish.add_argument("--parameters", type=float, default=1e9, help="of the random Qwen3-MoE (default 1e9)")
    publish.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="compute dtype (default bfloat16)")
    publish.add_argument("--master-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    publish.add_argument("--repeats", type=whole(1), default=7, help="rounds; medians are shown (default 7)")
    _runs(publish, _publish)


def _publish(known: argparse.Namespace, _console: Console) -> _Measured:
    from qarl.bench import publish

    found = publish.measure(known.scheme, known.parameters, known.dtype, known.master_dtype, known.repeats)
    return publish.table(found), publish.as_data(found)


def _add_learner(names: Any) -> None:
    learner = names.add_parser(
        "learner", help="a learner step per scheme: time, its split and memory, against bf16 and against TRL"
    )
    learner.add_argument(
        "--models", type=words(LEARNER_MODELS), default="tiny", help="comma-separated: tiny (default), 150m"
    )
    learner.add_argument(
        "--schemes", type=scheme_names, default="w4a16,w8a8", help="comma-separated (default w4a16,w8a8); bf16 comes "
        "first",
    )  # fmt: skip
    learner.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="compute dtype (default bfloat16); masters are float32"
    )
    add_trl(learner, "default,no-checkpointing")
    learner.add_argument("--updates", type=whole(1), default=2, help="optimizer steps a batch (default 2)")
    learner.add_argument("--tokens", type=whole(2), help="of the median completion (default: the model's)")
    learner.add_argument(
        "--micro-batch-tokens", type=whole(1), default=4096, help="padded tokens a forward (default 4096)"
    )
    learner.add_argument("--steps", type=whole(1), default=2, help="timed steps a process (default 2)")
    learner.add_argument("--rounds", type=whole(1), default=3, help="of all processes; medians are shown (default 3)")
    learner.add_argument(
        "--checkpointing", action="store_true", help="QaRL's schemes with learner.gradient_checkpointing, too"
    )
    learner.add_argument("--compile", action="store_true", help="QaRL's schemes with learner.compile, too")
    learner.add_argument("--kernel", choices=KERNELS, default="auto", help="the learner's kernel family")
    learner.add_argument("--seed", type=whole(0), default=0, help="of weights and batch (default 0)")
    _runs(learner, _learner)


def _learner(known: argparse.Namespace, console: Console) -> _Measured:
    from qarl.bench.learner import measure as learner
    from qarl.bench.learner import table as learner_table

    settings, python = trl_settings(known)
    options = learner.Options(
        models=known.models, schemes=known.schemes, dtype=known.dtype, trl=settings, trl_python=python,
        updates=known.updates, steps=known.steps, rounds=known.rounds, tokens=known.tokens,
        micro_batch_tokens=known.micro_batch_tokens, kernel=known.kernel, seed=known.seed,
        variants=tuple(variant for variant in learner.VARIANTS if getattr(known, variant)),
    )  # fmt: skip
    rows = learner.measure(options, lambda line: console.print(line, highlight=False))
    return learner_table.table(rows, known.dtype), learner.as_data(rows)


def _add_train(names: Any) -> None:
    _runs(add_train(names), train, fields=True)


def _add_speed(names: Any) -> None:
    from qarl.cli import bench_speed

    speed = names.add_parser(
        "speed",
        help="decoding, prefill and a whole training step per scheme, against bf16; or a step predicted for GPUs",
        description=(
            "Measure every scheme this machine runs: the engine's decoding and prefill, a whole training step with a "
            "plain learner and with QaRL, memory, and how far all of it is from the machine's roofline. With --plan "
            "nothing is run: a step on GPUs is predicted from a model's shapes and stated rates (docs/bench-speed.md)."
        ),
    )
    bench_speed.add_options(speed)
    _runs(speed, bench_speed.measure)


def _add_others(names: Any) -> None:
    from qarl.cli import (
        bench_communication,
        bench_delivery,
        bench_delta,
        bench_memory,
        bench_soak,
    )

    _runs(bench_memory.add_options(names), bench_memory.measure, fields=True)
    for benchmark in (bench_communication, bench_delta, bench_delivery, bench_soak):
        _runs(benchmark.add_options(names), benchmark.measure)
