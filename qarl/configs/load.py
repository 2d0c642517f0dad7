"""Loader of a `RunConfig` from YAML files and dotted overrides, with errors for unknown keys that
suggest the nearest name.
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

from qarl.configs.errors import ConfigError, InputError, SchemeError
from qarl.configs.flags import FLAGS, OPTIONS_WITHOUT_FIELD, OTHER_TRAINERS_OPTIONS, flag_of
from qarl.configs.schema.base import (
    Choice,
    PathText,
    Section,
    Text,
    alternatives,
    expand_home,
)
from qarl.configs.schema.objectives import TbpoConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.validation_messages import validation_messages
from qarl.configs.words import did_you_mean
from qarl.configs.yaml_file import parse_value, read_yaml

_EMBEDDED = ("tiny-", "smollm2-")
"""Prefixes of the names of embedded models."""
_PAPER = "paper/qwen3-8b-base"
"""Shipped configuration for a model that the paper does not have."""
_PATTERNS = ("layers", "learner.lora.targets", "rollout.stop")
"""Lists of which one item may be written verbatim, in text that YAML would read differently."""
_LIKELIEST = ("top_p", "top_k", "min_p")
"""Fields that restrict sampling to the likeliest tokens."""


def shipped_names() -> list[str]:
    """Return the names of the shipped YAML files: "tiny-qwen3", "paper/qwen3-8b-base",
    "recipes/qwen3-4b-80gb", …
    """
    root = files("qarl.configs")
    folders = {"": root, "paper/": root / "paper", "recipes/": root / "recipes"}
    names = [
        f"{prefix}{file.name}" for prefix, folder in folders.items() for file in folder.iterdir()
    ]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def config_file(name: str) -> Path:
    """Return a YAML file by its path, or a shipped one by its name. Raises `ConfigError` if neither
    exists.
    """
    name = expand_home(name)
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
    """Return whether `name` is an embedded model's, which has a shipped configuration."""
    return name.startswith(_EMBEDDED) and name in shipped_names()


def default_config(model: str | None) -> Path:
    """Return the file that a run without --config starts from: an embedded model's own, otherwise
    the paper's settings, for the model of that name if the paper has it.
    """
    if model is None:
        return config_file("tiny-qwen3")
    if is_embedded(model):
        return config_file(model)
    own = f"paper/{model.rstrip('/').rpartition('/')[2].lower()}"
    return config_file(own if own in shipped_names() else _PAPER)


def field_paths(
    section: type[Section] = RunConfig,
    prefix: str = "",
) -> dict[str, Any]:
    """Return dotted path → pydantic `FieldInfo` of every leaf field. In a choice it is that of the
    first alternative that has the field.
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
    """Return whether `--path` is the option of a field, or of a key in a free-form field."""
    known = field_paths()
    parent = path.rpartition(".")[0]
    return path in known or (parent in known and known[parent].annotation == dict[str, Any])


def sections(
    section: type[Section] = RunConfig, prefix: str = ""
) -> dict[str, tuple[type[Section], ...]]:
    """Return dotted path → the class of a section, or the alternatives of one chosen by name."""
    inner: dict[str, tuple[type[Section], ...]] = {}
    for name, info in section.model_fields.items():
        parts = alternatives(info.annotation)
        if parts:
            inner[f"{prefix}{name}"] = parts
        for part in parts:
            inner |= sections(part, f"{prefix}{name}.")
    return inner


def choice_sections() -> dict[str, tuple[type[Choice], ...]]:
    """Return dotted path → the alternatives of every section that is chosen by name."""
    chosen = {
        path: tuple(part for part in parts if issubclass(part, Choice))
        for path, parts in sections().items()
    }
    return {path: parts for path, parts in chosen.items() if parts}


def load_config(file: Path | None, overrides: dict[str, str]) -> RunConfig:
    """Return the resolved configuration: defaults, then the YAML file, then dotted overrides
    (YAML-typed values).

    If an override names another objective (correction, aggregation, KL penalty) than the file, that
    section starts from its defaults, because the file's options were for the other one. The same
    holds for a task, and for the correction and aggregation of another objective. Raises
    `ConfigError` for an unreadable file, an unknown key (with the nearest), or a value out of
    range.
    """
    tree = read_yaml(file) if file else {}
    refuse_unknown(tree, str(file))
    return overridden(tree, overrides)


def chosen_config(name: str | None, overrides: dict[str, str]) -> RunConfig:
    """Return the configuration of a file or shipped name, or the default one, with overrides."""
    file = default_config(overrides.get("model")) if name is None else config_file(name)
    return load_config(file, overrides)


def overridden(tree: dict[str, Any], overrides: Mapping[str, str]) -> RunConfig:
    """Return the configuration of a tree under dotted overrides; see `load_config`."""
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
    """Return the configuration of nested dictionaries.

    Raises `ConfigError` for wrong fields, and `SchemeError` if a scheme is unknown and nothing else
    is wrong.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> InputError:
    """Return the error for the wrong fields: a `SchemeError` itself if it is the only one."""
    problems = error.errors()
    cause = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(cause, SchemeError):
        return cause
    return ConfigError(validation_messages(error, field_paths(), _field_of))


def written_fields(file: Path) -> list[str]:
    """Return the dotted paths of the fields that a YAML file sets."""
    return _leaf_paths(read_yaml(file), field_paths())


def refuse_unknown(tree: dict[str, Any], source: str) -> None:
    """Raise `ConfigError` if a key is not a field, with the nearest one that is."""
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
    """Return whether a path leads through mappings, rather than being one key with dots."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _refuse_likeliest(path: str) -> None:
    """Raise `ConfigError` if `path` would restrict sampling to the likeliest tokens."""
    section, _, leaf = path.rpartition(".")
    if section in ("rollout", "") and leaf in _LIKELIEST:
        raise ConfigError(
            f"{path}: a policy is trained on completions of its whole distribution. The learner's"
            " log-probs are of all tokens, and ratios to a sampler that leaves some out would be"
            f" wrong; omit it (evaluation has eval.{leaf}), or lower rollout.temperature"
        )


def _field_of(location: tuple[str | int, ...]) -> str:
    """Return the dotted path of a pydantic error's location, which also contains the names chosen
    for sections.
    """
    parts: list[str] = []
    for part in map(str, location):
        choices = choice_sections().get(".".join(parts), ())
        if not any(part in section.names() for section in choices):
            parts.append(part)
    return ".".join(parts)


def _names_another_objective(tree: dict[str, Any], name: Any) -> bool:
    """Return whether an override names another objective than a file's tree does."""
    learner = tree.get("learner")
    written = learner.get("objective", {}) if isinstance(learner, dict) else None
    if name is None or not isinstance(written, dict):
        return False
    return name != written.get("name", TbpoConfig().name)


def _forget_unchosen(tree: dict[str, Any], section: str, name: Any) -> None:
    """Empty a section of the file that was written for another `name` than the chosen one. Files
    are compared by their paths.
    """
    *parents, leaf = section.split(".")
    for key in parents:
        tree = tree.get(key) or {}
        if not isinstance(tree, dict):
            return
    if name is not None and isinstance(tree.get(leaf), dict):
        written = tree[leaf].get("name", field_paths()[f"{section}.name"].default)
        paths = [os.path.abspath(expand_home(str(each))) for each in (written, name)]
        if paths[0] != paths[1]:
            tree[leaf] = {}


def _leaf_paths(
    tree: dict[str, Any],
    known: dict[str, Any],
    prefix: str = "",
) -> list[str]:
    """Return the dotted paths of a tree's values. A section that is not a mapping is left out,
    because the schema reports it.
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
    """Return the message for an option that is not a field."""
    inside = [name for name in known if name.startswith(path + ".")]
    if inside:
        return f"option --{path} is a section; give one of its fields, such as --{inside[0]}"
    _refuse_likeliest(path)
    return (
        "unknown option"
        f" --{path}{_suggestion(path, _as_option, '`qarl train --help` lists the options')}"
    )


def _as_option(path: str) -> str:
    """Return "--samples (rollout.samples)", or "--learner.kl.name" if there is no short flag."""
    flag = flag_of(path)
    return f"--{flag}" if flag == path else f"--{flag} ({path})"


def _as_key(path: str) -> str:
    """Return a field as a key in YAML: "rollout: {samples: …}"."""
    return f"{path.replace('.', ': {')}: …{'}' * path.count('.')}"


def _suggestion(name: str, written: Callable[[str], str], listing: str) -> str:
    """Return what follows an unknown name in a message: the nearest field, a remark on why there
    is none, or `listing`.

    written: formats a field's dotted path.
    """
    leaf = name.rpartition(".")[2]
    dashed = [part.replace("_", "-") for part in (name, leaf)]
    for word in dashed:
        if word in OPTIONS_WITHOUT_FIELD:
            return f" ({OPTIONS_WITHOUT_FIELD[word]})"
    field = _nearest_field(name, leaf, dashed)
    return f"; did you mean {written(field)}?" if field else f"; {listing}"


def _nearest_field(name: str, leaf: str, dashed: list[str]) -> str | None:
    """Return the dotted path of the field that an unknown name probably means, or None.

    leaf: the name's last part. dashed: name and leaf with dashes for underscores.
    """
    known = field_paths()
    options = OTHER_TRAINERS_OPTIONS | FLAGS
    for word in dashed:
        if word in options:
            return options[word]
    fields = options | {path: path for path in known}
    for word in difflib.get_close_matches(name, fields, n=1, cutoff=0.7):
        return fields[word]
    for path in known:
        if path.rpartition(".")[2] == leaf:
            return path
    for word in difflib.get_close_matches(name, fields, n=1):
        return fields[word]
    return None


def set_field(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a field of nested dictionaries by dotted path, and create missing sections on the way."""
    *parents, leaf = path.split(".")
    for key in parents:
        if not isinstance(tree.get(key, {}), dict):
            return  # the file's error, which the schema reports
        tree = tree.setdefault(key, {})
    tree[leaf] = value


def _parse(path: str, text: str, known: dict[str, Any]) -> Any:
    """Return the value of an override. A text field takes text verbatim, except for "null" if it is
    optional.

    Patterns over layer names in their short form are not YAML (`*` begins an alias) and pass as
    text, and so does text that ends a completion (`#` begins a comment).
    """
    annotation = known[path].annotation if path in known else Any
    kinds = () if get_origin(annotation) is tuple else get_args(annotation)
    optional = Text in kinds or PathText in kinds
    if annotation in (str, Text) or (optional and text != "null"):
        return text
    # [INST] is a text, ['[INST]'] a list
    is_list = path != "rollout.stop" or re.search(r"[,'\"]|\[\]", text)
    if path in _PATTERNS and not (text.lstrip().startswith("[") and is_list):
        return text
    if not text.strip():
        raise ConfigError(f"option --{path} {text!r} is empty; give a value, or omit it")
    try:
        return parse_value(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it is not a YAML value"
        raise ConfigError(
            f"option --{path} {text!r} cannot be read ({problem}); give a plain value, or a list as"
            " '[A, B]'"
        ) from error
