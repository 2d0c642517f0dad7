"""What the commands of `qarl` share: fields of the configuration as options, types of options,
lines, and JSON.
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
    """Dotted overrides from the short flags and from what argparse left over: `--a.b=VALUE`, and of
    benchmarks, whose own options go first, short flags too. Raises `ConfigError` for an option
    given twice, also where once by its short flag and once by its name.
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
    """Print text as it is, on a line as long as it is."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def text_width(columns: int) -> int:
    """Columns that text is wrapped to in a terminal of so many: 50 to 120."""
    return min(max(columns, 50), 120)


def json_file(text: str) -> str:
    """The `type` of `--json`: refuses what `write_json` could not write, before the work and not
    after it.
    """
    file = Path(text)
    place = file if file.exists() else file.parent
    if file.is_dir() or not os.access(place, os.W_OK):
        why = "is a folder" if file.is_dir() else f"{str(place)!r} cannot be written to"
        raise ArgumentTypeError(f"{text}: {why}; name a file elsewhere")
    return text


def write_json(file: str | None, data: Any) -> None:
    """Write `data` to `file`, if there is one: a line for each key, NaN and infinities, which JSON
    has not, as null.
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
    """Words with commas between, each once."""
    return tuple(dict.fromkeys(word for word in text.split(",") if word))


def words(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the `type` of an option that takes one or more words of `known` with commas between,
    each once. It refuses others while the command line is read, before anything heavy is imported.
    """

    def parse(text: str) -> tuple[str, ...]:
        for word in split(text) or ("",):
            if word not in known:
                near = did_you_mean(word.lower(), known)
                raise ArgumentTypeError(f"{word!r} must be one of {', '.join(known)}{near}")
        return split(text)

    return parse


scheme_names = words(SCHEME_NAMES)
"""The `type` of `--schemes`."""


def numbers(example: str, least: int = 0) -> Callable[[str], tuple[int, ...]]:
    """The `type` of an option that takes different whole numbers from `least` up, with commas
    between.
    """

    def parse(text: str) -> tuple[int, ...]:
        items = text.split(",")
        if not all(item.isdecimal() and int(item) >= least for item in items) or len(
            set(items)
        ) < len(items):
            raise ArgumentTypeError(
                f"{text!r} must be different whole numbers from {least} up with commas between,"
                f" such as {example}"
            )
        return tuple(map(int, items))

    return parse


def whole(least: int) -> Callable[[str], int]:
    """The `type` of an option that takes a whole number from `least` up."""

    def parse(text: str) -> int:
        if not text.removeprefix("+").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} must be a whole number from {least} up")
        return int(text)

    return parse


seeds = numbers("0,1,2")
"""The `type` of `--seeds`."""
