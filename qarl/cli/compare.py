"""`qarl compare`: train and compare variants of one configuration over seeds."""

import argparse
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import add_count, add_json, say, seeds, split, write_json
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
            "Compare variants of one configuration over seeds by what they deploy: schemes,"
            " objectives, quantization afterwards."
        ),
        usage=(
            "qarl compare [FILE] [--vary OPTION=A,B] [--seeds 0,1,2] [OPTIONS] [--ANY.FIELD"
            " VALUE …]"
        ),
        description=(
            "Train every variant with every seed, each in its own folder as `qarl train` does, and"
            " compare over seeds what they deploy and how they got there. Runs are kept: the same"
            " command continues where it stopped. If a run fails it is shown, the others go on,"
            " and the exit status is 1. FILE is a YAML file or a shipped one:"
            f" {', '.join(shipped_comparisons())}. Options of `qarl train` apply to all variants"
            " that do not set them."
        ),
    )
    add = compare.add_argument
    add(
        "file",
        nargs="?",
        metavar="FILE",
        help="Comparison to run: a YAML file or a shipped name.",
    )
    add(
        "--vary",
        type=_vary,
        action="append",
        default=[],
        metavar="OPTION=A,B",
        help=(
            "Make a variant for each value, and for each combination if given again. With FILE it"
            " applies to the variants that do not set it."
        ),
    )
    add(
        "--variants",
        type=split,
        default=(),
        metavar="A,B",
        help="Variants of FILE to run. Default: all.",
    )
    add(
        "--seeds",
        type=seeds,
        default=(),
        metavar="0,1,2",
        help="Seeds of the runs. Default: those of FILE, else 0,1,2.",
    )
    add(
        "--config",
        metavar="CONFIG",
        help="Configuration of all runs: a YAML file or a shipped name.",
    )
    add("--output", metavar="FOLDER", help="Folder of the runs. Default: runs/compare-FILE.")
    add_count(compare, "--workers", "Runs at a time, which share cores and GPUs.", 1)
    add_count(compare, "--processes", "Processes of each run, as for `qarl train`.")
    add(
        "--dry-run",
        action="store_true",
        help="Check everything, show what is left to run, and exit.",
    )
    add_json(compare, "Write every figure as JSON too, with command, commit, machine and versions.")
    compare.set_defaults(run=_compare, fields=True)


def _vary(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the dotted path and the values of a `--vary` option."""
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
