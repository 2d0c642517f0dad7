"""Patterns that match checkpoint names of layers, in the syntax of `LayerRule.match`."""

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_DECODER_LAYER = re.compile(r"\D*?\.(\d+)\.")


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, in their order.

    `re:…` matches from the start of a name, as in compressed-tensors. `first:K` and `last:K` match
    everything in the first or last K decoder layers. Anything else is an exact name or a shell
    pattern, whose `*` also spans dots.
    """
    if pattern.startswith("re:"):
        expression = re.compile(pattern[3:])
        return [name for name in names if expression.match(name)]
    kind, _, count = pattern.partition(":")
    if kind in ("first", "last"):
        layers = sorted({layer for name in names if (layer := _decoder_layer(name)) is not None})
        if int(count) > len(layers):
            return []
        chosen = layers[: int(count)] if kind == "first" else layers[-int(count) :]
        return [name for name in names if _decoder_layer(name) in chosen]
    return [name for name in names if name == pattern or fnmatchcase(name, pattern)]


def nearest_names(pattern: str, names: Sequence[str]) -> str:
    """Return a message about the names that a pattern without matches may have meant."""
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
    """Return the first number in a name ("model.layers.12.mlp.experts.3.up_proj" → 12), or None.

    Names outside the decoder layers have none.
    """
    match = _DECODER_LAYER.match(name)
    return int(match[1]) if match else None
