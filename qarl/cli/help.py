"""The help of `qarl train`: the common flags by group on one or two screens, every field with
`--help-all`.

Defaults are those of the command without options (configs/tiny-qwen3.yaml), where they differ from
the schema's.
"""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from qarl.cli.options import text_width
from qarl.cli.parser import PrintAndExit
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
"""Title → short flags. Every short flag is in one group (tests/test_help.py)."""

EPILOG = (
    "Defaults in brackets are those of `qarl train` alone; with --model or --config the paper's or"
    " the file's count, which --dry-run prints. Every field of the configuration is an option by"
    " its dotted name, such as --learner.lora.name lora: --help-all lists them."
)

_FEW = 4
"""Values an option may have to be listed in place of a metavariable."""


def add_config(parser: argparse.ArgumentParser) -> None:
    """CONFIG of a command that begins with it."""
    text = "YAML file, or a shipped name; default: as `qarl train`"
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=text)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Make every field of the configuration an option of a command: short flags by group, and
    `--help-all`.
    """
    parser.set_defaults(fields=True)
    defaults = default_values()
    parser.add_argument(
        "--help-all",
        action=PrintAndExit,
        text=lambda: all_fields(shutil.get_terminal_size().columns),
        help="every field of the configuration, with its default",
    )
    for title, names in GROUPS.items():
        add_group(parser, title, names, defaults)


def add_group(
    parser: argparse.ArgumentParser,
    title: str,
    names: Sequence[str],
    defaults: Mapping[str, Any],
) -> None:
    """Add a group of short flags. names: of `FLAGS`. defaults: dotted path → what the help shows as
    its default.
    """
    fields = field_paths()
    group = parser.add_argument_group(title)
    for name in names:
        path = FLAGS[name]
        default = written(defaults[path])
        text = f"{describe(path, fields[path])}{f' [{default}]' if default else ''}"
        group.add_argument(
            f"--{name}",
            metavar=metavar(path, fields[path]),
            dest=f"short:{path}",
            help=text.replace("%", "%%"),
        )


def default_values() -> dict[str, Any]:
    """Dotted path → the value it has in a run without options, of every field such a run has."""
    return leaf_values(load_config(default_config(None), {}))


def written(value: Any) -> str:
    """A default as a person would type it; "" for nothing (None, an empty list)."""
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        digits, _, exponent = f"{value:e}".partition("e")
        return (
            f"{value:g}"
            if value >= 1e-2 or value == 0
            else f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
        )
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return ",".join(map(written, value)) if isinstance(value, tuple) else str(value)


def describe(path: str, info: Any) -> str:
    """A field's description; of a section's deciding name, the names too."""
    section, _, leaf = path.rpartition(".")
    parts = choice_sections().get(section, ()) if leaf == "name" else ()
    names = ", ".join(name for part in parts for name in part.names())
    return f"{info.description} One of {names}." if names else info.description


def metavar(path: str, info: Any) -> str:
    """What stands for an option's value: its few alternatives, N for a whole number, X for a
    number, or VALUE.
    """
    section, _, leaf = path.rpartition(".")
    if leaf == "name" and section in choice_sections():
        return "NAME"
    kinds = [
        kind for kind in get_args(info.annotation) or (info.annotation,) if kind is not NoneType
    ]
    words = list(get_args(info.annotation)) if get_origin(info.annotation) is Literal else []
    for kind in kinds:
        words += (
            get_args(kind)
            if get_origin(kind) is Literal
            else ("true", "false")
            if kind is bool
            else ()
        )
    # a whole number within bounds
    if words and any(int in get_args(kind) for kind in kinds):
        words.insert(0, "N")
    words = [str(word) for word in dict.fromkeys(words)]
    if words:
        return "|".join(words) if len(words) <= _FEW else "NAME"
    return {int: "N", float: "X"}.get(kinds[0], "VALUE")


def all_fields(columns: int) -> str:
    """Every field by section, with default and description, wrapped to `columns` (`text_width`)."""
    width = text_width(columns)
    fields, defaults, lines = (
        field_paths(),
        default_values(),
        textwrap.wrap(EPILOG, width),
    )
    for section, parts in {"": (RunConfig,), **sections()}.items():
        lines += _heading(section or "run", parts, width)
        for leaf in dict.fromkeys(leaf for part in parts for leaf in part.model_fields):
            path = f"{section}.{leaf}".lstrip(".")
            if path in fields:
                default = [written(defaults[path])] if path in defaults else []
                default += [_alternatives(parts, leaf)] if len(parts) > 1 and leaf != "name" else []
                lines += _field(
                    path,
                    metavar(path, fields[path]),
                    "; ".join(default),
                    fields[path].description,
                    width,
                )
    return "\n".join(lines)


def _alternatives(parts: Sequence[Any], leaf: str) -> str:
    """A field's default in each alternative of its section that has it."""
    fields = {part: part.model_fields[leaf] for part in parts if leaf in part.model_fields}
    return ", ".join(
        f"{'/'.join(part.names())} "
        f"{'required' if field.is_required() else written(field.get_default(call_default_factory=True)) or 'none'}"
        for part, field in fields.items()
    )


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


def _field(path: str, value: str, default: str, text: str | None, width: int) -> Iterator[str]:
    shown = f"--{path} {value}{f'  [{default}]' if default else ''}"
    yield from textwrap.wrap(
        shown,
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
    )
    yield from textwrap.wrap(text or "", width, initial_indent="      ", subsequent_indent="      ")
