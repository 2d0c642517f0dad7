"""Help of `qarl train`: `--help` shows the common flags by group on one or two screens, and
`--help-all` every field.

Defaults are those of the command without options (configs/tiny-qwen3.yaml), which may differ from
the schema's.
"""

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from qarl.cli.options import text_width
from qarl.cli.parser import FieldOption, PrintAndExit
from qarl.configs.flags import FLAGS
from qarl.configs.load import (
    choice_sections,
    default_config,
    field_paths,
    load_config,
    sections,
)
from qarl.configs.schema.base import Section, leaf_values
from qarl.configs.schema.run import RunConfig

GROUPS = {
    "what is trained": (
        "model",
        "scheme",
        "scale",
        "init",
        "layers",
        "dtype",
        "task",
        "reward",
    ),
    "how long, and where it is written": (
        "steps",
        "seed",
        "eval-every",
        "checkpoint-every",
        "record",
        "output",
    ),
    "sampling": ("from-rollouts", "prompts", "samples", "max-new-tokens"),
    "learning": (
        "objective",
        "optimizer",
        "lr",
        "mini-batches",
        "master-dtype",
        "aligned",
        "kernel",
    ),
}
"""Title of a group → its short flags. Each is in one group (tests/qarl/test_help.py)."""

EPILOG = (
    "Defaults in brackets are those of `qarl train` without options. With --model or --config the"
    " paper's or the file's apply, which --dry-run prints. Every field of the configuration is an"
    " option by its dotted name, such as --learner.lora.name lora; --help-all lists them."
)

_FEW = 4
"""Most values that are listed in place of a metavariable."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument CONFIG to a command."""
    text = "YAML file, or a shipped name. Default: as `qarl train`."
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=text)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Make every field of the configuration an option of a command. Short flags are added by group;
    `--help-all` lists the rest.
    """
    parser.set_defaults(fields=True)
    parser.add_argument(
        "--help-all",
        action=PrintAndExit,
        text=lambda: all_fields(shutil.get_terminal_size().columns),
        help="Print every field with its default, and exit.",
    )
    for title, names in GROUPS.items():
        add_group(parser, title, names, default_values)


def add_group(
    parser: argparse.ArgumentParser,
    title: str,
    names: Sequence[str],
    defaults: Callable[[], Mapping[str, Any]],
) -> None:
    """Add a group of short flags.

    names: keys of `FLAGS`. defaults: returns dotted path → the default that the help shows.
    """
    fields = field_paths()
    group = parser.add_argument_group(title)
    for name in names:
        path = FLAGS[name]
        group.add_argument(
            f"--{name}",
            action=FieldOption,
            shown_default=lambda path=path: written(defaults()[path]),
            metavar=metavar(path, fields[path]),
            dest=f"short:{path}",
            help=describe(path, fields[path]).replace("%", "%%"),
        )


@cache
def default_values() -> Mapping[str, Any]:
    """Return dotted path → value of every field of a run without options."""
    return leaf_values(load_config(default_config(None), {}))


def written(value: Any) -> str:
    """Return a default as a person would type it; "" for None and for empty collections."""
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if value >= 1e-2 or value == 0:
            return f"{value:g}"
        digits, _, exponent = f"{value:e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return ",".join(map(written, value)) if isinstance(value, tuple) else str(value)


def describe(path: str, info: Any) -> str:
    """Return a field's description. If the field chooses its section, the names are listed too."""
    section, _, leaf = path.rpartition(".")
    parts = choice_sections().get(section, ()) if leaf == "name" else ()
    names = ", ".join(name for part in parts for name in part.names())
    return f"{info.description} One of {names}." if names else info.description


def metavar(path: str, info: Any) -> str:
    """Return the metavariable of an option: its alternatives if they are few, NAME if they are
    many, N for a whole number, X for a number, otherwise VALUE.
    """
    section, _, leaf = path.rpartition(".")
    if leaf == "name" and section in choice_sections():
        return "NAME"
    kinds = [
        kind for kind in get_args(info.annotation) or (info.annotation,) if kind is not NoneType
    ]
    words = list(get_args(info.annotation)) if get_origin(info.annotation) is Literal else []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += get_args(kind)
        elif kind is bool:
            words += ("true", "false")
    # a whole number with bounds is Annotated[int, …]
    if words and any(int in get_args(kind) for kind in kinds):
        words.insert(0, "N")
    words = [str(word) for word in dict.fromkeys(words)]
    if words:
        return "|".join(words) if len(words) <= _FEW else "NAME"
    return {int: "N", float: "X"}.get(kinds[0], "VALUE")


def all_fields(columns: int) -> str:
    """Return every field by section with default and description, wrapped to `columns` (see
    `text_width`).
    """
    width = text_width(columns)
    fields = field_paths()
    defaults = default_values()
    lines = textwrap.wrap(EPILOG, width)
    for section, parts in {"": (RunConfig,), **sections()}.items():
        lines += _heading(section or "run", parts, width)
        for leaf in dict.fromkeys(leaf for part in parts for leaf in part.model_fields):
            path = f"{section}.{leaf}".lstrip(".")
            if path not in fields:
                continue
            shown = [written(defaults[path])] if path in defaults else []
            if len(parts) > 1 and leaf != "name":
                shown.append(_alternatives(parts, leaf))
            value = metavar(path, fields[path])
            lines += _field(path, value, "; ".join(shown), fields[path].description, width)
    return "\n".join(lines)


def _alternatives(parts: Sequence[Any], leaf: str) -> str:
    """Return a field's default in each alternative of its section that has the field."""
    shown = []
    for part in parts:
        if leaf not in part.model_fields:
            continue
        field = part.model_fields[leaf]
        if field.is_required():
            default = "required"
        else:
            default = written(field.get_default(call_default_factory=True)) or "none"
        shown.append(f"{'/'.join(part.names())} {default}")
    return ", ".join(shown)


def _heading(path: str, sections: Any, width: int) -> Iterator[str]:
    yield ""
    if len(sections) == 1:
        yield from textwrap.wrap(
            f"{path}: {_first_line(sections[0])}", width, subsequent_indent="  "
        )
        return
    yield f"{path}:"
    for section in sections:
        text = f"{', '.join(section.names())}: {_first_line(section)}"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _field(
    path: str,
    value: str,
    default: str,
    text: str | None,
    width: int,
) -> Iterator[str]:
    shown = f"--{path} {value}{f'  [{default}]' if default else ''}"
    yield from textwrap.wrap(
        shown,
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
    )
    yield from textwrap.wrap(text or "", width, initial_indent="      ", subsequent_indent="      ")
