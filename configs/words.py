"""Words that error messages share: nearest names, and what a field may hold."""

import difflib
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from pydantic.fields import FieldInfo

_SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Of annotated_types' bounds."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ "; did you mean 'grpo'?" where one of `known` is near `word`, else ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def quoted(value: Any, longest: int = 80) -> str:
    """A value as a message shows it, on one line and not without end."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def literals(annotation: Any) -> list[str]:
    """The words an annotation allows, None and types left out."""
    if typing.get_origin(annotation) is Literal:
        return [str(word) for word in typing.get_args(annotation)]
    return [word for part in typing.get_args(annotation) for word in literals(part)]


def allowed(info: FieldInfo) -> str:
    """What a leaf field may hold: "a whole number, at least 1", "one of adamw, muon", "text"."""
    return _kind(info.annotation) + _bounds(info.metadata)


def _kind(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(part) for part in parts if part is not type(None)]
        return " or ".join([*kinds, *(["null"] if type(None) in parts else [])])
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}" if len(parts) > 1 else str(parts[0])
    if origin is typing.Annotated:
        return _kind(parts[0]) + _bounds(parts[1:])
    if origin is tuple and Ellipsis not in parts:
        return f"a list of {len(parts)} values, each {_kind(next(iter(parts)))}"
    if origin is dict:
        return "a mapping, such as {min_terms: 2}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text that is not empty"}
    return names.get(annotation, "a list, or its short form A,B")


def _bounds(metadata: Iterable[Any]) -> str:
    words = []
    for part in metadata:
        bounds = getattr(part, "metadata", None) or [part]  # of a FieldInfo within Annotated
        signs = ((bound, sign) for bound in bounds for sign in _SIGNS if hasattr(bound, sign))
        words += [f"{_SIGNS[sign]} {getattr(bound, sign)}" for bound, sign in signs]
    return "".join(f", {word}" for word in words)
