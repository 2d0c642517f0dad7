"""Reading YAML as a person means it: every key once, 1e-6 a number, and faults said in one line."""

from pathlib import Path
from typing import Any

import yaml

from qarl.configs.errors import ConfigError


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice; YAML's own loader lets the last win in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=deep), key_node.start_mark.line + 1  # pyright: ignore
            if isinstance(key, str | int) and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice, in lines {seen[key]} and {line}; keep one"
                )
            if isinstance(key, str | int):
                seen[key] = line
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> dict[str, Any]:
    """The keys and values of a UTF-8 file, {} where it is empty. Raises `ConfigError` for anything else."""
    try:
        tree = yaml.load(file.read_text(encoding="utf-8-sig"), _OnceLoader)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration {str(file)!r} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); "
            "save it as UTF-8"
        ) from error
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = error.problem or "it cannot be parsed"
        fault = reason if "given twice" in reason else f"is not YAML: {reason}"
        raise ConfigError(f"configuration {str(file)!r}{place}: {fault}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"configuration {str(file)!r} is not YAML: {str(error).splitlines()[0]}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration {str(file)!r} must hold keys and values, not a {type(tree).__name__}")
    return tree


def parse_value(text: str) -> Any:
    """A YAML scalar or flow collection, with 1e-6 read as a number (YAML 1.1 wants a dot). Raises `yaml.YAMLError`."""
    try:
        return float(text) if "e" in text.lower() else yaml.load(text, _OnceLoader)
    except ValueError:
        return yaml.load(text, _OnceLoader)
