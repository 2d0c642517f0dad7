"""A refused configuration in one message: each wrong field with its value, what is allowed, and the nearest word."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from qarl.configs.flags import shown
from qarl.configs.words import allowed, did_you_mean, literals, quoted

_ABSENT = object()


def validation_messages(
    error: ValidationError,
    tree: Mapping[str, Any],
    leaves: Mapping[str, FieldInfo],
    paths: Mapping[tuple[Any, ...], str],
) -> str:
    """What to change, the messages about several fields joined by "; ".

    tree: what was refused. leaves: every leaf field by dotted path. paths: the dotted path of each of the error's
    locations.
    """
    messages: dict[str, str] = {}
    for problem in error.errors():
        path = paths[problem["loc"]]
        leaf = next((leaf for leaf in leaves if path == leaf or path.startswith(leaf + ".")), None)
        if problem["type"] == "value_error":
            text = problem["msg"].removeprefix("Value error, ")
            messages[path] = f"{path}: {text}" if path else text
        elif leaf is None:
            messages[path] = _no_leaf(path, problem, leaves)
        elif problem["type"] in ("missing", "extra_forbidden") and not path.rpartition(".")[2].isdecimal():
            messages[path] = _wrong_item(leaf, path, problem, leaves[leaf])
        else:
            messages[leaf] = _wrong_value(leaf, _value(tree, leaf), leaves[leaf])
    return "; ".join(messages.values())


def _wrong_value(path: str, value: Any, info: FieldInfo) -> str:
    if value is _ABSENT:
        return f"{shown(path)} is missing; it must be {allowed(info)}"
    words = literals(info.annotation)
    near = did_you_mean(value, words, 0.5) if isinstance(value, str) else ""
    return f"{shown(path)} {quoted(value)} must be {allowed(info)}{near}"


def _wrong_item(leaf: str, path: str, problem: Any, info: FieldInfo) -> str:
    """Of a list whose items have keys of their own, such as layer rules."""
    key = path.rpartition(".")[2]
    if problem["type"] == "missing" and leaf == path:
        return f"{shown(leaf)} is missing; give --{leaf}: {info.description}"
    if problem["type"] == "missing":
        return f"{shown(leaf)}: {quoted(problem['input'])} lacks {key!r}"
    return f"{shown(leaf)}: {path} {quoted(problem['input'])} is no key of such an item"


def _no_leaf(path: str, problem: Any, leaves: Mapping[str, FieldInfo]) -> str:
    inside = [leaf for leaf in leaves if leaf.startswith(path + ".")]
    if inside:
        value = "is empty" if problem["input"] is None else f"{quoted(problem['input'])} is no mapping"
        return f"{path} {value}; it is a section: give its fields, such as {inside[0]}, or leave it out"
    return f"unknown key {path!r}{did_you_mean(path, leaves)}"


def _value(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return _ABSENT
        tree = tree[key]
    return tree
