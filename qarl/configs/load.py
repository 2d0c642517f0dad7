"""From YAML files and dotted overrides to a `RunConfig`: shipped files, unknown keys, nearest
names.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from qarl.configs.errors import ConfigError
from qarl.configs.flags import ELSEWHERE, FLAGS, flag_of
from qarl.configs.schema.base import (
    Choice,
    PathText,
    Section,
    Text,
    alternatives,
    at_home,
)
from qarl.configs.schema.objectives import TbpoConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.validation_messages import validation_messages
from qarl.configs.words import did_you_mean
from qarl.configs.yaml_file import parse_value, read_yaml

_EMBEDDED = ("tiny-", "smollm2-")
"""What the names of embedded models begin with."""
_PAPER = "paper/qwen3-8b-base"
_PATTERNS = ("layers", "learner.lora.targets", "rollout.stop")
"""Lists whose one item may be written as it is, in words that YAML would read in its own way."""
_LIKELIEST = ("top_p", "top_k", "min_p")
"""Ways to sample from the likeliest tokens alone."""


def shipped_names() -> list[str]:
    """Names of the shipped YAML files: "tiny-qwen3", "paper/qwen3-8b-base",
    "recipes/qwen3-4b-80gb", …
    """
    folders = {"": files("qarl.configs")} | {
        f"{name}/": files("qarl.configs") / name for name in ("paper", "recipes")
    }
    names = [
        f"{prefix}{file.name}" for prefix, folder in folders.items() for file in folder.iterdir()
    ]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def config_file(name: str) -> Path:
    """A YAML file by path, or a shipped one by name. Raises `ConfigError` where there is
    neither.
    """
    name = at_home(name)
    if Path(name).is_file():
        return Path(name)
    if name in shipped_names():
        return Path(str(files("qarl.configs") / f"{name}.yaml"))
    if Path(name).is_dir():
        raise ConfigError(
            f"configuration {name!r} is a folder; give a YAML file in it (config.yaml in a run's)"
        )
    raise ConfigError(
        f"no configuration file {name!r}, and no shipped one of that name"
        f" ({', '.join(shipped_names())}){did_you_mean(name, shipped_names())}"
    )


def is_embedded(name: str) -> bool:
    """Return whether `name` is an embedded model's: those have a configuration of their name."""
    return name.startswith(_EMBEDDED) and name in shipped_names()


def default_config(model: str | None) -> Path:
    """Return the file that a run without --config starts from: an embedded model's own, else the
    paper's settings, of the model of that name where the paper has it.
    """
    if model is None:
        return config_file("tiny-qwen3")
    if is_embedded(model):
        return config_file(model)
    own = f"paper/{model.rstrip('/').rpartition('/')[2].lower()}"
    return config_file(own if own in shipped_names() else _PAPER)


def field_paths(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every leaf field by dotted path → its pydantic `FieldInfo`; of a choice, the first
    alternative's that has it.
    """
    paths: dict[str, Any] = {}
    for name, info in section.model_fields.items():
        inner = alternatives(info.annotation)
        if not inner:
            paths[prefix + name] = info
        for part in inner:
            for path, leaf in field_paths(part, f"{prefix}{name}.").items():
                paths.setdefault(path, leaf)
    return paths


def is_option(path: str) -> bool:
    """Whether `--path` is one: of a field, or of a key in a free-form one."""
    known, parent = field_paths(), path.rpartition(".")[0]
    return path in known or (parent in known and known[parent].annotation == dict[str, Any])


def sections(
    section: type[Section] = RunConfig, prefix: str = ""
) -> dict[str, tuple[type[Section], ...]]:
    """Dotted path → the section's class, or the alternatives of one that is chosen by its name."""
    inner: dict[str, tuple[type[Section], ...]] = {}
    for name, info in section.model_fields.items():
        parts = alternatives(info.annotation)
        inner |= {f"{prefix}{name}": parts} if parts else {}
        for part in parts:
            inner |= sections(part, f"{prefix}{name}.")
    return inner


def choice_sections() -> dict[str, tuple[type[Choice], ...]]:
    """Sections with a deciding `name`, by dotted path → their alternatives."""
    chosen = {
        path: tuple(part for part in parts if issubclass(part, Choice))
        for path, parts in sections().items()
    }
    return {path: parts for path, parts in chosen.items() if parts}


def load_config(file: Path | None, overrides: dict[str, str]) -> RunConfig:
    """The resolved configuration: defaults, then the YAML file, then dotted overrides (YAML-typed
    values).

    An override that names another objective (correction, aggregation, KL penalty) than the file
    starts from that one's defaults: the file's options were for the other, and so were its
    correction and aggregation for another objective. So does one that names another task. Raises
    `ConfigError` for an unreadable file, an unknown key (with the nearest), or a value out of
    range.
    """
    tree = read_yaml(file) if file else {}
    refuse_unknown(tree, str(file))
    return overridden(tree, overrides)


def chosen_config(name: str | None, overrides: dict[str, str]) -> RunConfig:
    """The configuration of that file or shipped name, or the default's, with its overrides."""
    return load_config(
        default_config(overrides.get("model")) if name is None else config_file(name),
        overrides,
    )


def overridden(tree: dict[str, Any], overrides: Mapping[str, str]) -> RunConfig:
    """The configuration of a tree under dotted overrides; see `load_config`."""
    known = field_paths()
    unknown = [path for path in overrides if not is_option(path)]
    if unknown:
        raise ConfigError("; ".join(_unknown_option(path, known) for path in unknown))
    chosen = {path: _parse(path, text, known) for path, text in overrides.items()}
    if _names_another_objective(tree, chosen.get("learner.objective.name")):
        tree["learner"] = {
            k: v for k, v in tree["learner"].items() if k not in ("correction", "aggregation")
        }
    for section in choice_sections():
        _forget_unchosen(tree, section, chosen.get(f"{section}.name"))
    _forget_unchosen(tree, "task", chosen.get("task.name"))
    for path, value in chosen.items():
        set_field(tree, path, value)
    return config_from_tree(tree)


def config_from_tree(tree: dict[str, Any]) -> RunConfig:
    """A configuration from nested dictionaries; raises `ConfigError` naming each wrong field."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(validation_messages(error, field_paths(), _field_of)) from error


def written_fields(file: Path) -> list[str]:
    """Dotted paths of what a YAML file says."""
    return _leaf_paths(read_yaml(file), field_paths())


def refuse_unknown(tree: dict[str, Any], source: str) -> None:
    """Raise `ConfigError` for a key that is no field, with the nearest that is."""
    known = field_paths()
    unknown = [
        path for path in _leaf_paths(tree, known) if path not in known or not _is_nested(tree, path)
    ]
    for path in unknown:
        _refuse_likeliest(path)
    if unknown:
        listing = "`qarl train --help-all` lists the keys"
        words = (
            f"unknown key {path!r} in {source}{_suggestion(path, _as_key, listing)}"
            for path in unknown
        )
        raise ConfigError("; ".join(words))


def _is_nested(tree: Any, path: str) -> bool:
    """Whether a path leads through mappings, and is not written as a key with dots."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _refuse_likeliest(path: str) -> None:
    section, _, leaf = path.rpartition(".")
    if section in ("rollout", "") and leaf in _LIKELIEST:
        raise ConfigError(
            f"{path}: a policy is trained on completions of its whole distribution. The learner's"
            " log-probs are of all tokens, and ratios to a sampler that leaves some out would be"
            f" wrong; leave it out (evaluation has eval.{leaf}), or lower rollout.temperature"
        )


def _field_of(location: tuple[str | int, ...]) -> str:
    """The dotted path of a pydantic error's location, which also holds the name chosen for a
    section.
    """
    parts: list[str] = []
    for part in map(str, location):
        alternatives_here = choice_sections().get(".".join(parts), ())
        if not any(part in section.names() for section in alternatives_here):
            parts.append(part)
    return ".".join(parts)


def _names_another_objective(tree: dict[str, Any], name: Any) -> bool:
    learner = tree.get("learner")
    written = learner.get("objective", {}) if isinstance(learner, dict) else None
    return isinstance(written, dict) and name not in (
        None,
        written.get("name", TbpoConfig().name),
    )


def _forget_unchosen(tree: dict[str, Any], section: str, name: Any) -> None:
    """Empty a section of the file that was for another `name` than the chosen one; a file's name is
    its path.
    """
    *parents, leaf = section.split(".")
    for key in parents:
        tree = tree.get(key) or {}
        if not isinstance(tree, dict):
            return
    if name is not None and isinstance(tree.get(leaf), dict):
        written = tree[leaf].get("name", field_paths()[f"{section}.name"].default)
        if len({os.path.abspath(at_home(str(each))) for each in (written, name)}) > 1:
            tree[leaf] = {}


def _leaf_paths(tree: dict[str, Any], known: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of a tree's values; a section that holds no mapping is left to the schema, which
    says so.
    """
    paths: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if not any(name.startswith(path + ".") for name in known):
            paths.append(path)
        elif isinstance(value, dict):
            paths += _leaf_paths(value, known, path + ".")
    return paths


def _unknown_option(path: str, known: dict[str, Any]) -> str:
    inside = [name for name in known if name.startswith(path + ".")]
    if inside:
        return f"option --{path} is a section; give one of its fields, such as --{inside[0]}"
    _refuse_likeliest(path)
    return (
        "unknown option"
        f" --{path}{_suggestion(path, _as_option, '`qarl train --help` lists the options')}"
    )


def _as_option(path: str) -> str:
    """ "--samples (rollout.samples)", and "--learner.kl.name" of a field without a short flag."""
    return f"--{flag}" if (flag := flag_of(path)) == path else f"--{flag} ({path})"


def _as_key(path: str) -> str:
    """ "rollout: {samples: …}"."""
    return f"{path.replace('.', ': {')}: …{'}' * path.count('.')}"


def _suggestion(name: str, written: Callable[[str], str], listing: str) -> str:
    """What follows a name of no field: the nearest field as `written` has it, or why there is none,
    or `listing`.
    """
    known = field_paths()
    leaf = name.rpartition(".")[2]
    elsewhere = ELSEWHERE | FLAGS
    fields = elsewhere | {path: path for path in known}
    near = (
        [word for part in (name, leaf) if (word := part.replace("_", "-")) in elsewhere]
        or difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
        or [path for path in known if path.rpartition(".")[2] == leaf]
        or difflib.get_close_matches(name, fields, n=1)
    )
    if not near:
        return f"; {listing}"
    field = fields[near[0]]
    return f" ({field})" if " " in field else f"; did you mean {written(field)}?"


def set_field(tree: dict[str, Any], path: str, value: Any) -> None:
    """Write a field of nested dictionaries, by dotted path; sections on the way are made where they
    are missing.
    """
    *parents, leaf = path.split(".")
    for key in parents:
        if not isinstance(tree.get(key, {}), dict):
            return  # the file's fault, which the schema names
        tree = tree.setdefault(key, {})
    tree[leaf] = value


def _parse(path: str, text: str, known: dict[str, Any]) -> Any:
    """The value of an override. A text field takes text as it is, and "null" where it may be left
    open.

    Patterns over layer names in their short form are no YAML (`*` begins an alias there) and pass
    as text, and so does a text that ends a completion (`#` begins a comment).
    """
    annotation = known[path].annotation if path in known else Any
    maybe = get_origin(annotation) is not tuple and any(
        kind in get_args(annotation) for kind in (Text, PathText)
    )
    if annotation in (str, Text) or (maybe and text != "null"):
        return text
    # [INST] is a text, ['[INST]'] a list
    is_list = path != "rollout.stop" or re.search(r"[,'\"]|\[\]", text)
    if path in _PATTERNS and not (text.lstrip().startswith("[") and is_list):
        return text
    if not text.strip():
        raise ConfigError(f"option --{path} {text!r} is empty; give a value, or leave it out")
    try:
        return parse_value(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it is no YAML value"
        raise ConfigError(
            f"option --{path} {text!r} cannot be read ({problem}); give a plain value, or a list as"
            " '[A, B]'"
        ) from error
