"""What the commands of `qarl` share: options left over by argparse, and results as JSON."""

import argparse
import json
from pathlib import Path
from typing import Any

from configs.errors import ConfigError


def dotted_overrides(known: argparse.Namespace, rest: list[str]) -> dict[str, str]:
    """Dotted overrides from the short flags and from what argparse left over (`--a.b VALUE` or `--a.b=VALUE`). Of an
    option given twice the last value counts; raises `ConfigError` for one given by its short flag and by its name."""
    short = {k.removeprefix("short:"): v for k, v in vars(known).items() if k.startswith("short:") and v is not None}
    found = dict(short)
    items = iter(rest)
    for item in items:
        if not item.startswith("--"):
            raise ConfigError(f"unexpected argument {item!r}; options read --name VALUE")
        name, equals, value = item[2:].partition("=")
        if not equals:
            value = next(items, None)
            if value is None:
                raise ConfigError(f"option --{name} needs a value")
        if name in short:
            raise ConfigError(
                f"--{name} {value} is also given by its short flag, with {short[name]!r}; give it once, by either"
            )
        found[name] = value
    return found


def refuse_rest(rest: list[str]) -> None:
    """Raises `ConfigError` where argparse left anything over."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see --help")


def write_json(file: str | None, data: Any) -> None:
    """Write `data` to `file`, if one was asked for."""
    if file:
        Path(file).write_text(json.dumps(data, indent=2) + "\n")
