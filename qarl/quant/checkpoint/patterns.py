"""Patterns on checkpoint names of layers, as `LayerRule.match` writes them."""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_DECODER_LAYER = re.compile(r"\D*?\.(\d+)\.")


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names a pattern matches, in their order.

    `re:…` matches from the start of a name (as compressed-tensors matches it), `first:K` and
    `last:K` everything in the first or last K decoder layers, anything else is an exact name or a
    shell pattern whose `*` also spans dots.
    """
    if pattern.startswith("re:"):
        expression = re.compile(pattern[3:])
        return [name for name in names if expression.match(name)]
    kind, _, count = pattern.partition(":")
    if kind in ("first", "last"):
        layers = sorted({layer for name in names if (layer := _decoder_layer(name)) is not None})
        chosen = (
            ()
            if int(count) > len(layers)
            else layers[: int(count)]
            if kind == "first"
            else layers[-int(count) :]
        )
        return [name for name in names if _decoder_layer(name) in chosen]
    return [name for name in names if name == pattern or fnmatchcase(name, pattern)]


def nearest_names(pattern: str, names: Sequence[str]) -> str:
    """What a pattern that matches nothing may have meant, in words."""
    if pattern.startswith(("first:", "last:")):
        return f"it has {len({_decoder_layer(name) for name in names} - {None})} decoder layers"
    leaves = list(dict.fromkeys("*." + name.rpartition(".")[2] for name in names))
    near = difflib.get_close_matches(
        pattern.removeprefix("re:"), [*names, *leaves], n=3, cutoff=0.5
    )
    if near:
        return f"near it are {', '.join(map(repr, near))}"
    return (
        f"its layers end in {', '.join(leaf[2:] for leaf in leaves)}; a full name is {names[0]!r}"
        if names
        else ""
    )


def _decoder_layer(name: str) -> int | None:
    """The first number in a name ("model.layers.12.mlp.experts.3.up_proj" → 12); None for layers
    outside them.
    """
    match = _DECODER_LAYER.match(name)
    return int(match[1]) if match else None
