"""Helpers that the commands of `qarl` share: dotted overrides, types of options, printed lines, and
JSON.
"""

import argparse
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, get_args

from pydantic_core import to_json
from rich.console import Console

from qarl.configs.errors import ConfigError
from qarl.configs.flags import FLAGS
from qarl.configs.load import is_option
from qarl.configs.schema.base import Dtype
from qarl.configs.schemes import SCHEME_NAMES
from qarl.configs.words import did_you_mean

DTYPES = get_args(Dtype)


def dotted_overrides(known: argparse.Namespace, rest: list[str]) -> dict[str, str]:
    """Collect dotted overrides from the short flags and from the arguments that argparse left over.

    known: what argparse read. rest: what it left over, `--a.b=VALUE`; for benchmarks, whose own
    options take precedence, short flags too. Raises `ConfigError` if an option is given twice, or
    once by its short flag and once by its name.
    """
    short = {
        k.removeprefix("short:"): v
        for k, v in vars(known).items()
        if k.startswith("short:") and v is not None
    }
    overrides = dict(short)
    for item in rest:
        if not item.startswith("--"):
            file = (
                f"; a configuration is --config {item}" if item.endswith((".yaml", ".yml")) else ""
            )
            raise ConfigError(f"unexpected argument {item!r}; options read --name VALUE{file}")
        name, equals, value = item[2:].partition("=")
        name = FLAGS.get(name, name)
        if not equals and is_option(name):
            raise ConfigError(f"option --{name} needs a value")
        if name == "config" and name in known:
            if known.config is not None:
                raise ConfigError(
                    f"--config {value} is a second one, beside {known.config!r}; give one of them"
                )
            known.config = value
            continue
        if name in short:
            raise ConfigError(
                f"--{name} {value} is also given by its short flag, with {short[name]!r}; give it"
                " once, by either"
            )
        if name in overrides:
            raise ConfigError(
                f"option --{name} is given twice, with {overrides[name]!r} and {value!r}; give it"
                " once"
            )
        overrides[name] = value
    return overrides


def say(console: Console, text: str) -> None:
    """Print text verbatim, without markup and without wrapping."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def text_width(columns: int) -> int:
    """Return the width to wrap text to in a terminal of `columns`: 50 to 120."""
    return min(max(columns, 50), 120)


def json_file(text: str) -> str:
    """Return `text`, the `type` of `--json`. Raises `ArgumentTypeError` if `write_json` could not
    write the file, so that this shows before the work and not after it.
    """
    file = Path(text)
    target = file if file.exists() else file.parent
    if file.is_dir() or not os.access(target, os.W_OK):
        why = "is a folder" if file.is_dir() else f"{str(target)!r} cannot be written to"
        raise ArgumentTypeError(f"{text}: {why}; name a file elsewhere")
    return text


def write_json(file: str | None, data: Any) -> None:
    """Write `data` to `file` unless that is None, one line for each key. NaN and infinities, which
    JSON lacks, become null.
    """
    if file:
        items = (
            [{key: value} for key, value in data.items()]
            if isinstance(data, dict)
            else [[item] for item in data]
        )
        begin, end = "{}" if isinstance(data, dict) else "[]"
        lines = ",\n".join(to_json(item, inf_nan_mode="null").decode()[1:-1] for item in items)
        Path(file).write_text(f"{begin}\n{lines}\n{end}\n", encoding="utf-8")


def split(text: str) -> tuple[str, ...]:
    """Split words at commas and drop repetitions."""
    return tuple(dict.fromkeys(word for word in text.split(",") if word))


def words(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the `type` of an option that takes one or more comma-separated words of `known`, each
    once. It refuses others while the command line is read, before anything heavy is imported.
    """

    def parse(text: str) -> tuple[str, ...]:
        for word in split(text) or ("",):
            if word not in known:
                near = did_you_mean(word.lower(), known)
                raise ArgumentTypeError(f"{word!r} must be one of {', '.join(known)}{near}")
        return split(text)

    return parse


scheme_names = words(SCHEME_NAMES)
"""`type` of `--schemes`."""


def numbers(
    example: str,
    least: int = 0,
) -> Callable[[str], tuple[int, ...]]:
    """Return the `type` of an option that takes different comma-separated whole numbers from
    `least` up.
    """

    def parse(text: str) -> tuple[int, ...]:
        items = text.split(",")
        valid = all(item.isdecimal() and int(item) >= least for item in items)
        if not valid or len(set(items)) < len(items):
            raise ArgumentTypeError(
                f"{text!r} must be different whole numbers from {least} up with commas between,"
                f" such as {example}"
            )
        return tuple(map(int, items))

    return parse


def whole(least: int) -> Callable[[str], int]:
    """Return the `type` of an option that takes a whole number from `least` up."""

    def parse(text: str) -> int:
        if not text.removeprefix("+").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} must be a whole number from {least} up")
        return int(text)

    return parse


def add_count(
    group: Any, option: str, text: str, default: int | None = None, least: int = 1
) -> None:
    """Add an option that takes a whole number from `least` up; its help ends with its default."""
    if default is not None:
        text += f" Default: {default}."
    group.add_argument(option, type=whole(least), default=default, metavar="N", help=text)


def add_json(group: Any, text: str) -> None:
    """Add `--json FILE` to a command, whose file can be written."""
    group.add_argument("--json", type=json_file, metavar="FILE", help=text)


seeds = numbers("0,1,2")
"""`type` of `--seeds`."""
