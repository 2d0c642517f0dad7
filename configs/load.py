"""From YAML files and dotted overrides to a `RunConfig`: shipped files, unknown keys, nearest names."""

import difflib
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.errors import ConfigError
from configs.schema.base import Choice, Section, alternatives
from configs.schema.run import RunConfig

_EMBEDDED = "tiny-"


def shipped_names() -> list[str]:
    """Names of the shipped YAML files."""
    return sorted(p.name.removesuffix(".yaml") for p in files("configs").iterdir() if p.name.endswith(".yaml"))


def config_file(name: str) -> Path:
    """A YAML file by path, or a shipped one by name. Raises `ConfigError` where there is neither."""
    if Path(name).is_file():
        return Path(name)
    if name in shipped_names():
        return Path(str(files("configs") / f"{name}.yaml"))
    raise ConfigError(f"no configuration file {name!r}, and no shipped one of that name ({', '.join(shipped_names())})")


def default_config(model: str | None) -> Path:
    """Where a run without --config starts: the embedded policy's own file, else the paper's settings."""
    if model is None:
        return config_file("tiny-qwen3")
    return config_file(model if model.startswith(_EMBEDDED) and model in shipped_names() else "paper")


def field_paths(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every leaf field by dotted path → its pydantic `FieldInfo`; of a choice, the first alternative's that has it."""
    paths: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        inner = alternatives(info.annotation)
        if not inner:
            paths[prefix + name] = info
        for part in inner:
            for path, leaf in field_paths(part, f"{prefix}{name}.").items():
                paths.setdefault(path, leaf)
    return paths


def choice_sections(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, tuple[type[Choice], ...]]:
    """Sections with a deciding `name`, by dotted path → their alternatives."""
    found: dict[str, tuple[type[Choice], ...]] = {}
    for name, info in section.model_fields.items():
        parts = alternatives(info.annotation)
        if parts and all(issubclass(part, Choice) for part in parts):
            found[prefix + name] = parts  # pyright: ignore[reportArgumentType]
        for part in parts:
            found |= choice_sections(part, f"{prefix}{name}.")
    return found


def load_config(file: Path | None, overrides: dict[str, str]) -> RunConfig:
    """The resolved configuration: defaults, then the YAML file, then dotted overrides (YAML-typed values).

    An override that names another objective (correction, aggregation, KL penalty) than the file starts from that one's
    defaults: the file's options were for the other. Raises `ConfigError` for an unreadable file, an unknown key (with
    the nearest), or a value out of range.
    """
    tree = _read_yaml(file) if file else {}
    _refuse_unknown(tree, str(file))
    chosen = {path: _parse(path, text) for path, text in overrides.items()}
    for section in choice_sections():
        _forget_unchosen(tree, section, chosen.get(f"{section}.name"))
    for path, value in chosen.items():
        _set(tree, path, value)
    return config_from_tree(tree)


def config_from_tree(tree: dict[str, Any]) -> RunConfig:
    """A configuration from nested dictionaries; raises `ConfigError` naming each wrong field."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path = _field_of(problem["loc"])
            given = "" if problem["type"] == "missing" or not path else f" (given: {problem['input']!r})"
            lines.append(f"{path}{': ' if path else ''}{problem['msg'].removeprefix('Value error, ')}{given}")
        raise ConfigError("; ".join(lines)) from error


def _field_of(location: tuple[str | int, ...]) -> str:
    """The dotted path of a pydantic error's location, which also holds the name chosen for a section."""
    parts: list[str] = []
    for part in map(str, location):
        alternatives_here = choice_sections().get(".".join(parts), ())
        if not any(part in section.names() for section in alternatives_here):
            parts.append(part)
    return ".".join(parts)


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read configuration {str(file)!r}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {str(file)!r} is not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration {str(file)!r} must hold keys and values, not a {type(tree).__name__}")
    return tree


def _forget_unchosen(tree: dict[str, Any], section: str, name: Any) -> None:
    *parents, leaf = section.split(".")
    for key in parents:
        tree = tree.get(key) or {}
    if name is not None and tree.get(leaf) and tree[leaf].get("name") != name:
        tree[leaf] = {}


def _refuse_unknown(tree: dict[str, Any], source: str) -> None:
    known = field_paths()
    for path in _leaf_paths(tree, known):
        if path not in known:
            raise ConfigError(f"unknown key {path!r} in {source}{_nearest(path, known)}")


def _leaf_paths(tree: dict[str, Any], known: dict[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        is_section = any(name.startswith(path + ".") for name in known)
        paths += _leaf_paths(value, known, path + ".") if is_section and isinstance(value, dict) else [path]
    return paths


def _nearest(path: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(path, known, n=1) or [k for k in known if k.endswith("." + path.split(".")[-1])]
    return f"; did you mean {near[0]!r}?" if near else "; `qarl train --help` lists the keys"


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    known = field_paths()
    parent = path.rpartition(".")[0]
    free_form = parent in known and known[parent].annotation == dict[str, Any]
    if path not in known and not free_form:
        raise ConfigError(f"unknown option --{path}{_nearest(path, known)}")
    *parents, leaf = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[leaf] = value


def _parse(path: str, text: str) -> Any:
    """A YAML scalar or flow collection, with 1e-6 read as a number (YAML 1.1 wants a dot).

    Patterns over layer names in their short form are no YAML (`*` begins an alias there) and pass as text.
    """
    if path in ("layers", "learner.lora.targets") and not text.lstrip().startswith("["):
        return text
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        pass
    except yaml.YAMLError as error:
        raise _unreadable(path, text, error) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _unreadable(path, text, error) from error


def _unreadable(path: str, text: str, error: yaml.YAMLError) -> ConfigError:
    return ConfigError(f"option --{path} {text!r} is not a YAML value: {error}; quote it twice to give it as text")
