"""What commands take and print, kept so that a change of an option, a default or a word is seen:
every option, what command lines come to or why they are refused, plans with their remedies, tables,
the built-in tasks.

Record anew, where a change is meant: tests/support/records.py.
"""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from qarl.advice.finding import Finding
from qarl.cli import main as cli
from qarl.cli.main import main
from qarl.cli.mismatch import show
from qarl.cli.options import text_width
from qarl.cli.runs import _age
from qarl.cli.schemes import SchemeRow, _show, checkpoint_bytes
from qarl.configs.load import default_config, load_config
from qarl.embedded.recipe import RECIPES, recipe_config
from qarl.quant.checkpoint.load import empty_model
from qarl.quant.schemes import SCHEMES
from qarl.tasks import ReasoningGymTask
from tests.support.cases import cases
from tests.support.records import assert_recorded


def commands(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser and those of its commands, each with its name, such as "bench speed"."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, other in action.choices.items():
                yield from commands(other, f"{name} {command}".strip())


def test_every_option_of_every_command_and_every_field(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """Names, counts, choices, defaults and types; what --help makes of them is Python's."""
    options = {
        f"{name} {'/'.join(each.option_strings) or each.dest}": " ".join(
            map(
                str,
                (
                    each.nargs,
                    each.choices,
                    each.default,
                    getattr(each.type, "__name__", ""),
                    each.metavar,
                ),
            )
        )
        for name, parser in commands(cli._parser())
        for each in parser._actions
        if not isinstance(each, argparse._SubParsersAction)
        and (name == "train" or not each.dest.startswith("short:"))
    }
    assert_recorded(__file__, "options", options)
    monkeypatch.setenv("COLUMNS", "110")
    assert main(["train", "--help-all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert_recorded(
        __file__,
        "fields",
        [line for line in lines if line.startswith("  -")] + lines[:12],
    )


@pytest.mark.parametrize("row", cases(__file__, "rows"))
def test_command_lines_and_what_they_come_to(
    row: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The overrides and own options of `qarl train`, whose lines begin with an option; else the
    refusal.
    """
    monkeypatch.chdir(tmp_path)
    shown: dict[str, Any] = {}

    def take(known: argparse.Namespace, console: Console) -> int:
        shown[line] = [
            known.overrides,
            known.config,
            known.resume,
            known.processes,
            known.dry_run,
            known.to_vllm,
        ]
        return 0

    for line in map(str.strip, row.split("|")):
        with patch.object(cli, "_train", take):
            status = main([*(["train"] if line[0] == "-" else []), *shlex.split(line)])
        shown.setdefault(line, [status, capsys.readouterr().err[:250]])
    assert_recorded(__file__, row, shown)


@pytest.mark.parametrize("line", cases(__file__, "plans"))
def test_plans_with_their_remedies(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    status = main(["plan", *line.split()])
    written = Path("plan.json").read_text() if Path("plan.json").exists() else ""
    assert_recorded(
        __file__,
        f"plan {line}",
        [status, capsys.readouterr().out.splitlines(), written],
    )


def test_tables(capsys: pytest.CaptureFixture[str]):
    """Schemes that run here and that do not; findings one by one; what is trained; ages of runs;
    widths of text.
    """
    console = Console(width=100)
    why = ["", "scheme 'b': too old. Else", "no (vLLM has it for GPUs)", "word " * 20]
    sizes = [(n / 3 or None, n * 2**29 or None) for n in range(6)]
    some = [(*each, "odd" * (n == 2), "k" * (n < 2), why[n % 4]) for n, each in enumerate(sizes)]
    rows = [SchemeRow(f"s{n}", "w", "a", "f", *each) for n, each in enumerate(some)]
    for model, verbose in ((None, False), ("m", False), ("m", True)):
        _show(console, rows, model, verbose)
    show(
        [Finding("warning", "about", "text", "do"), Finding("note", "", "two\nlines")],
        console,
    )
    for file, resume, model, task in cases(__file__, "begun"):
        config = load_config(default_config(model), {"model": model, "task.name": task})
        with patch.object(cli, "installed", lambda name: "1.0"):
            cli._say_begun(argparse.Namespace(config=file, resume=resume), config, console)
    ages = [_age(seconds) for seconds in (-1, 0, 59, 60, 89, 91, 3599, 3600, 86399, 86400, 10**6)]
    widths = [text_width(columns) for columns in (10, 50, 51, 119, 120, 300)]
    model = empty_model(recipe_config(RECIPES["tiny-qwen3-moe"]))
    some_schemes = [SCHEMES[name] for name in ("bf16", "w4a16", "w8a8", "fp8", "w4a16-channel")]
    stored = [checkpoint_bytes(scheme, of, 2) for scheme in some_schemes for of in (None, model)]
    assert_recorded(
        __file__, "tables", [widths, capsys.readouterr().out.splitlines(), ages, stored]
    )


@pytest.mark.parametrize("name", cases(__file__, "tasks"))
def test_built_in_tasks_and_their_problems(name: str, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """What `qarl tasks NAME` says: options that QaRL leaves to choose, and an example if it needs
    none of them.
    """
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["tasks", name]) == 0
    more = {
        "running_total": {"digits": 2, "min_terms": 2, "max_terms": 5},
        "lookup_sum": {"max_terms": 9},
    }.get(name)
    tasks = [ReasoningGymTask(name, options) for options in (None, more) if "_sum" in name or more]
    problems = [
        vars(problem)
        for task in tasks
        for n in (0, 250, 512)
        for problem in task.problems("heldout", n, 8, 3)
    ]
    problems = [
        [
            p["id"],
            p["question"],
            p["answer"],
            p["metadata"].get("worked_solution", "")[-60:],
        ]
        for p in problems
    ]
    assert_recorded(__file__, name, [capsys.readouterr().out.splitlines(), problems])
