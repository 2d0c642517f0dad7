"""The help of `qarl train`: the common flags by group on one or two screens, every field with `--help-all`.

Defaults are those of the command without options (configs/tiny-qwen3.yaml), where they differ from the schema's.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from qarl.configs.load import choice_sections, default_config, field_paths, load_config
from qarl.configs.schema.base import Choice, Section, alternatives
from qarl.configs.schema.run import RunConfig

GROUPS = {
    "what is trained": ("model", "scheme", "scale", "init", "layers", "dtype", "task", "reward"),
    "how long, and where it is written": ("steps", "seed", "eval-every", "checkpoint-every", "record", "output"),
    "sampling": ("from-rollouts", "prompts", "samples", "max-new-tokens"),
    "learning": ("objective", "optimizer", "lr", "mini-batches", "master-dtype", "aligned", "kernel"),
}
"""Title → short flags. Every short flag is in one group (tests/test_help.py)."""

EPILOG = (
    "Defaults in brackets are those of `qarl train` alone; with --model or --config the paper's or the file's count, "
    "which --dry-run prints. Every field of the configuration is an option by its dotted name, such as "
    "--rollout.kv_cache_gib 4: --help-all lists them."
)

_NARROWEST, _WIDEST = 50, 120
"""Columns that text is wrapped to, whatever the terminal has."""

_FEW = 4
"""Values an option may have to be listed in place of a metavariable."""


def add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add the short flags, grouped, and `--help-all`. flags: without dashes → the dotted path of their field."""
    fields, defaults = field_paths(), default_values()
    parser.add_argument("--help-all", action=_HelpAll, help="every field of the configuration, with its default")
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            path = flags[name]
            default = written(defaults[path])
            text = f"{describe(path, fields[path])}{f' [{default}]' if default else ''}"
            group.add_argument(
                f"--{name}", metavar=metavar(path, fields[path]), dest=f"short:{path}", help=text.replace("%", "%%")
            )


class _HelpAll(argparse.Action):
    """Prints every field and exits, as `--help` does."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None):
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(all_fields(shutil.get_terminal_size().columns) + "\n")
        parser.exit()


def default_values() -> dict[str, Any]:
    """Dotted path → the value it has in a run without options, of every field such a run has."""
    return dict(_values(load_config(default_config(None), {}), ""))


def _values(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def written(value: Any) -> str:
    """A default as a person would type it; "" for nothing (None, an empty list)."""
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        digits, _, exponent = f"{value:e}".partition("e")
        return f"{value:g}" if value >= 1e-2 or value == 0 else f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return ",".join(map(written, value)) if isinstance(value, tuple) else str(value)


def describe(path: str, info: Any) -> str:
    """A field's description; of a section's deciding name, the names too."""
    section, _, leaf = path.rpartition(".")
    parts = choice_sections().get(section, ()) if leaf == "name" else ()
    names = ", ".join(name for part in parts for name in part.names())
    return f"{info.description}: {names}" if names else info.description


def metavar(path: str, info: Any) -> str:
    """What stands for an option's value: its few alternatives, N for a whole number, X for a number, or VALUE."""
    section, _, leaf = path.rpartition(".")
    if leaf == "name" and section in choice_sections():
        return "NAME"
    kinds = [kind for kind in get_args(info.annotation) or (info.annotation,) if kind is not NoneType]
    words = list(get_args(info.annotation)) if get_origin(info.annotation) is Literal else []
    for kind in kinds:
        words += get_args(kind) if get_origin(kind) is Literal else ("true", "false") if kind is bool else ()
    if words and any(int in get_args(kind) for kind in kinds):  # a whole number within bounds
        words.insert(0, "N")
    words = [str(word) for word in dict.fromkeys(words)]
    if words:
        return "|".join(words) if len(words) <= _FEW else "NAME"
    return {int: "N", float: "X"}.get(kinds[0], "VALUE")


def all_fields(columns: int) -> str:
    """Every field by section, with default and description, wrapped to `columns`."""
    width = min(max(columns, _NARROWEST), _WIDEST)
    lines = [*textwrap.wrap(EPILOG, width), *_section(RunConfig, "", width)]
    return "\n".join(lines)


def _section(section: type[Section], prefix: str, width: int) -> Iterator[str]:
    """Its own fields, then the sections in it."""
    inner = {name: alternatives(info.annotation) for name, info in section.model_fields.items()}
    yield from _heading(prefix.rstrip(".") or "run", [section], width)
    defaults = default_values()
    for name, info in section.model_fields.items():
        if not inner[name]:
            yield from _field(
                prefix + name, metavar(prefix + name, info), written(defaults[prefix + name]), info.description, width
            )
    for name, parts in inner.items():
        if all(issubclass(part, Choice) for part in parts) and parts:
            yield from _choice(f"{prefix}{name}", width)
        elif parts:
            yield from _section(parts[0], f"{prefix}{name}.", width)


def _choice(path: str, width: int) -> Iterator[str]:
    """A section chosen by its name: the alternatives, then the options that any of them has."""
    parts, fields, defaults = choice_sections()[path], field_paths(), default_values()
    yield from _heading(path, parts, width)
    chosen = defaults[f"{path}.name"]
    for leaf in dict.fromkeys(leaf for part in parts for leaf in part.model_fields):
        info = fields[f"{path}.{leaf}"]
        if leaf == "name":
            default = f"{chosen}"
        else:
            having = [part for part in parts if leaf in part.model_fields]
            default = ", ".join(f"{'/'.join(p.names())} {_written(p, leaf)}" for p in having)
            if chosen in (name for part in having for name in part.names()):
                default = f"{written(defaults[f'{path}.{leaf}'])}; {default}"
        option = f"{path}.{leaf}"
        yield from _field(option, metavar(option, info), default, info.description, width)


def _written(part: type[Choice], leaf: str) -> str:
    """A field's default."""
    field = part.model_fields[leaf]
    return "required" if field.is_required() else written(field.get_default(call_default_factory=True)) or "none"


def _heading(path: str, sections: Any, width: int) -> Iterator[str]:
    yield ""
    if len(sections) == 1:
        yield from textwrap.wrap(f"{path}: {_first_line(sections[0])}", width, subsequent_indent="  ")
        return
    yield f"{path}:"
    for section in sections:
        text = f"{', '.join(section.names())}: {_first_line(section)}"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ")


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


def _field(path: str, value: str, default: str, text: str | None, width: int) -> Iterator[str]:
    shown = f"--{path} {value}{f'  [{default}]' if default else ''}"
    yield from textwrap.wrap(shown, width, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    yield from textwrap.wrap(text or "", width, initial_indent="      ", subsequent_indent="      ")
