"""Message for an invalid configuration: each wrong field with its value, what is allowed, and the
nearest word.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from qarl.configs.flags import shown
from qarl.configs.words import did_you_mean, literals, quoted


def validation_messages(
    error: ValidationError,
    leaves: Mapping[str, FieldInfo],
    path_of: Callable[[tuple[Any, ...]], str],
) -> str:
    """Return the messages for all wrong fields, joined by "; ".

    leaves: every leaf field by dotted path. path_of: returns the dotted path of an error's
    location.
    """
    messages: dict[str, str] = {}
    allowed: dict[str, dict[str, None]] = {}
    for problem in error.errors():
        path = path_of(problem["loc"])
        leaf = next(
            (leaf for leaf in leaves if path == leaf or path.startswith(leaf + ".")),
            None,
        )
        if problem["type"] == "value_error":
            text = problem["msg"].removeprefix("Value error, ")
            messages[path] = f"{path}: {text}" if path else text
        elif leaf is None:
            messages[path] = _no_leaf(path, problem, leaves)
        elif (
            problem["type"] in ("missing", "extra_forbidden")
            and not path.rpartition(".")[2].isdecimal()
        ):
            messages[path] = _wrong_item(leaf, path, problem, leaves[leaf])
        # pydantic reports one problem per kind that a value may have, and per item of a list
        else:
            allowed.setdefault(leaf, {})[_allowed(problem)] = None
            messages[leaf] = (
                f"{shown(leaf)} {quoted(problem['input'])} must {' or '.join(allowed[leaf])}"
            )
            words = literals(leaves[leaf].annotation) if isinstance(problem["input"], str) else ()
            messages[leaf] += did_you_mean(problem["input"], words, 0.5) if words else ""
    return "; ".join(messages.values())


def _allowed(problem: Any) -> str:
    """Return what pydantic expects, to follow "must": "be greater than 0", "be a valid integer"."""
    if problem["type"] == "missing":
        return f"have item {problem['loc'][-1] + 1} too"
    words = problem["msg"].partition(" should ")[2].partition(", unable to ")[0]
    return (
        words.replace("tuple", "list")
        .replace("dictionary", "mapping")
        .replace("a valid boolean", "true or false")
    )


def _wrong_item(leaf: str, path: str, problem: Any, info: FieldInfo) -> str:
    """Return the message for an item of a list whose items have keys, such as layer rules."""
    key = path.rpartition(".")[2]
    if problem["type"] == "missing" and leaf == path:
        return f"{shown(leaf)} is missing; give --{leaf}: {info.description}"
    if problem["type"] == "missing":
        return f"{shown(leaf)}: {quoted(problem['input'])} lacks {key!r}"
    return f"{shown(leaf)}: {path} {quoted(problem['input'])} is not a key of such an item"


def _no_leaf(path: str, problem: Any, leaves: Mapping[str, FieldInfo]) -> str:
    """Return the message for a path that is a section, or that is unknown."""
    inside = [leaf for leaf in leaves if leaf.startswith(path + ".")]
    if inside:
        value = "is empty"
        if problem["input"] is not None:
            value = f"{quoted(problem['input'])} is not a mapping"
        return f"{path} {value}; it is a section: give its fields, such as {inside[0]}, or omit it"
    return f"unknown key {path!r}{did_you_mean(path, leaves)}"
