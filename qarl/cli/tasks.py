"""`qarl tasks`: list the built-in tasks, or one task's options with an example.

Loads reasoning-gym (2 s), but not torch.
"""

import argparse
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from qarl.cli.options import say, text_width
from qarl.tasks import DEFAULT_OPTIONS, ReasoningGymTask, TaskError
from qarl.tasks.load import MATH
from qarl.tasks.procedural import OWN_OPTIONS, dataset_of, reasoning_gym_datasets

_MATH = "math: answers in a box, judged by math-verify; the paper's data, or --task.data"


def add_tasks(commands: Any) -> None:
    """Add `qarl tasks` to the commands."""
    tasks = commands.add_parser(
        "tasks",
        help="List the built-in tasks, or one task's options and an example.",
        description=(
            "List the built-in tasks, or show one task's options, their defaults and an example."
        ),
        epilog=(
            "To train on questions of your own: qarl train --task FILE, a .jsonl, .csv, .tsv or"
            " .parquet file with columns question and answer, or hf:DATASET (docs/guide/tasks.md)."
        ),
    )
    tasks.add_argument("name", nargs="?", metavar="NAME", help="Name of a task.")
    tasks.set_defaults(run=_tasks)


def _tasks(known: argparse.Namespace, console: Console) -> int:
    width = text_width(shutil.get_terminal_size().columns)
    for line in _one(known.name, width) if known.name else _all(width):
        say(console, line)
    return 0


def _all(width: int) -> Iterator[str]:
    """Yield one line for each task."""
    datasets = reasoning_gym_datasets()
    column = 2 + max(map(len, datasets))
    for name, (dataset, _) in sorted(datasets.items()):
        summary = textwrap.shorten(_summary(dataset), width - column - 2, placeholder=" …")
        yield f"  {name:<{column}}{summary}".rstrip()
    yield f"{len(datasets)} tasks; options and an example of one: qarl tasks NAME"
    yield _MATH


def _one(name: str, width: int) -> Iterator[str]:
    """Yield what a task asks, its options with their defaults, and an example. Raises `TaskError`
    for an unknown name.
    """
    if name == MATH:
        yield (
            f"{_MATH} (docs/guide/tasks.md); it has no other options, and its questions are not"
            " read here"
        )
        return
    dataset, config = dataset_of(name)
    yield f"{name}: {_summary(dataset)}"
    yield ""
    yield "options, as --task.options.NAME VALUE:"
    # Describe options by the comments in reasoning-gym's source, the only description they have.
    comments = dict(
        re.findall(r"^ {4}(\w+): [^#\n]*#[ ]*(.+)$", inspect.getsource(config), re.MULTILINE)
    )
    fields = [field for field in dataclasses.fields(config) if field.name not in OWN_OPTIONS]
    for field in fields:
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        text = f"{field.name} [{default}]  {comments.get(field.name, '')}"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")
    if not fields:
        yield "  none"
    if name in DEFAULT_OPTIONS:
        ours = ", ".join(f"{option} {value}" for option, value in DEFAULT_OPTIONS[name].items())
        yield f"without any, QaRL takes {ours}"
    yield ""
    yield from _example(name)


def _example(name: str) -> Iterator[str]:
    try:
        (problem,) = ReasoningGymTask(name).problems("train", 0, 1, seed=0)
    except TaskError as error:
        yield f"no example without options: {error}"
        return
    for title, text in (("question", problem.question), ("answer", problem.answer)):
        yield f"{title}:"
        yield textwrap.indent(text, "  ")
    yield ""
    yield f"train on it: qarl train --task {name}"


def _summary(dataset: type) -> str:
    """Return reasoning-gym's one line on what a task asks, or ""."""
    return (dataset.__doc__ or "").strip().split("\n")[0]
