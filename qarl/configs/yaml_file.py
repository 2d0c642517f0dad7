"""Reader of YAML as a person means it: every key once, 1e-6 as a number, and errors in one line."""

import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from qarl.configs.errors import ConfigError


class _OnceLoader(yaml.SafeLoader):
    """Loader that refuses a key given twice in a mapping; YAML's own lets the last one win.

    Digits are decimal even after a leading zero, and 1:30 is not a number.
    """

    def construct_yaml_int(self, node: Any) -> Any:
        text = str(self.construct_scalar(node)).replace("_", "")
        if text.lstrip("+-").isdecimal():
            return int(text)
        return text if ":" in text else super().construct_yaml_int(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # its keys may be given again
            key = self.construct_object(key_node, deep=deep)
            line = key_node.start_mark.line + 1  # pyright: ignore
            if not isinstance(key, str | int):
                continue
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice, in lines {seen[key]} and {line}; keep one"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


_OnceLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)  # because YAML 1.1 requires a dot and a sign

# 08 is a number, as 07 is
_OnceLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?0\d+$"), list("-+0"))
_OnceLoader.add_constructor("tag:yaml.org,2002:int", _OnceLoader.construct_yaml_int)


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the keys and values of a UTF-8 file, {} if it is empty. Raises `ConfigError` if it
    cannot be read, or holds anything else.
    """
    try:
        tree = yaml.load(file.read_text(encoding="utf-8-sig"), _OnceLoader)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration {str(file)!r} is not UTF-8 text (byte {error.start} is"
            f" {error.object[error.start]:#04x}); save it as UTF-8"
        ) from error
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = error.problem or "it cannot be parsed"
        fault = reason if "given twice" in reason else f"is not YAML: {reason}"
        raise ConfigError(f"configuration {str(file)!r}{place}: {fault}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"configuration {str(file)!r} is not YAML: {str(error).splitlines()[0]}"
        ) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"configuration {str(file)!r} must hold keys and values, not a {type(tree).__name__}"
        )
    return tree


def parse_value(text: str) -> Any:
    """Parse a YAML scalar or flow collection. Raises `yaml.YAMLError`."""
    return yaml.load(text, _OnceLoader)


def as_text(value: Any) -> str:
    """Return a value as the text of an option, for `parse_value`: text and paths verbatim, others
    as JSON, which is YAML.
    """
    return str(value) if isinstance(value, str | PathLike) else json.dumps(value, default=str)


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return each option with `as_text` of its value."""
    return {name: as_text(value) for name, value in values.items()}
