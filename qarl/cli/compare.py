"""`qarl compare`: its options, and from them to the table."""

import argparse
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import json_file, say, seeds, split, whole, write_json
from qarl.compare.comparison import Comparison
from qarl.compare.file import (
    make_comparison,
    read_comparison,
    shipped_comparisons,
    varied,
)
from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.report.startup import phases_shown_on


def add_compare(commands: Any) -> None:
    """Add `qarl compare` to the commands."""
    compare = commands.add_parser(
        "compare",
        help=(
            "variants of one configuration over seeds, by what they deploy: schemes, objectives,"
            " quantized afterwards"
        ),
        usage=(
            "qarl compare [FILE] [--vary OPTION=A,B] [--seeds 0,1,2] [OPTIONS] [--ANY.FIELD"
            " VALUE …]"
        ),
        description=(
            "Train every variant with every seed, each as `qarl train` does in a folder of its"
            " own, and compare what they deploy and how they got there, over seeds. Runs are kept:"
            " the same command goes on where it stopped. A run that fails is shown, the rest goes"
            " on, and the exit status is 1. FILE is a YAML file, or a shipped one:"
            f" {', '.join(shipped_comparisons())}. Options of `qarl train` hold for all variants"
            " that do not set them."
        ),
    )
    add = compare.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="what is compared: a YAML file, or a shipped name",
    )
    add(
        "--vary",
        type=_vary,
        action="append",
        default=[],
        metavar="OPTION=A,B",
        help=(
            "a variant for each value, and for each combination where given again; of a FILE's"
            " variants those that do not set it"
        ),
    )
    add(
        "--variants",
        type=split,
        default=(),
        metavar="A,B",
        help="these of the FILE's alone",
    )
    add(
        "--seeds",
        type=seeds,
        default=(),
        metavar="0,1,2",
        help="default: the FILE's, else 0,1,2",
    )
    add(
        "--config",
        metavar="CONFIG",
        help="configuration of all runs: a YAML file or a shipped name",
    )
    add("--output", metavar="FOLDER", help="of the runs (default runs/compare-FILE)")
    add(
        "--workers",
        type=whole(1),
        default=1,
        metavar="N",
        help="runs at a time, sharing cores and GPUs (default 1)",
    )
    add(
        "--processes",
        type=whole(1),
        metavar="N",
        help="of each run, as of `qarl train`",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check all, show what is left to run, and exit",
    )
    add(
        "--json",
        type=json_file,
        metavar="FILE",
        help="write every figure as JSON too, with command, commit, machine and versions",
    )
    compare.set_defaults(run=_compare, fields=True)


def _vary(text: str) -> tuple[str, tuple[str, ...]]:
    """The dotted path and its values."""
    name, equals, values = text.partition("=")
    if not equals or len(split(values)) < 2:
        raise ArgumentTypeError(
            f"{text!r} must be an option and two values or more, such as scheme=bf16,w4a16"
        )
    return FLAGS.get(name, name), split(values)


def _compare(options: argparse.Namespace, console: Console) -> int:
    comparison = _comparison(options, options.overrides)
    quiet_libraries()
    from qarl.compare.commands import check

    with phases_shown_on(console):
        left = check(comparison, options.processes)
    if options.dry_run:
        for cell, commands in left.items():
            words = "; ".join(f"qarl {' '.join(command)}" for command in commands) or "finished"
            say(console, f"{cell.name}: {words}")
        return 0
    return _measure(comparison, left, options, console)


def _comparison(options: argparse.Namespace, overrides: dict[str, str]) -> Comparison:
    if options.file is None and not options.vary:
        raise ConfigError(
            "nothing to compare; give a YAML file, a shipped name "
            f"({', '.join(shipped_comparisons())}), or --vary scheme=bf16,w4a16"
        )
    vary: dict[str, tuple[str, ...]] = {}
    for path, values in options.vary:
        if path in vary:
            raise ConfigError(
                f"--vary {path} is given twice, with {','.join(vary[path])} and {','.join(values)}"
            )
        vary[path] = values
    file = varied(vary) if options.file is None else read_comparison(options.file)
    name = "" if options.file is None else f"-{Path(options.file).stem}"
    return make_comparison(
        file,
        Path(options.output or f"runs/compare{name}"),
        overrides,
        vary={} if options.file is None else vary,
        variants=options.variants,
        seeds=options.seeds,
        config=options.config,
    )


def _measure(
    comparison: Comparison, left: Any, options: argparse.Namespace, console: Console
) -> int:
    from qarl.compare.cells import run_cells
    from qarl.compare.figures import as_data, measured_cells, table
    from qarl.report.record import record

    failed = run_cells(comparison, left, options.workers, console)
    for each in failed:
        say(console, f"failed: {each.cell.name} ({each.log}):\n{each.reason}")
    cells = measured_cells(comparison)
    if cells:
        table(cells).show(console)
    data = as_data(cells) | {"failed": [each.cell.name for each in failed]}
    write_json(options.json, record(options.arguments, data) if options.json else None)
    return 1 if failed else 0
