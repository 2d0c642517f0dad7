"""Phrases that error messages share: nearest names, and values as they are shown."""

import difflib
import json
import traceback
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "; did you mean 'grpo'?" if one of `known` is near `word`, else ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def quoted(value: Any) -> str:
    """Return a value as a message shows it: on one line of at most 80 characters.

    A longer one loses its middle: the end of a path names its file.
    """
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:39]}…{text[-40:]}"


def error_text(error: BaseException) -> str:
    """Return an exception's text; its type and the line that raised it if the text is empty."""
    text = str(error).strip()
    if text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    folder, _, file = frames[-1].filename.rpartition("/")
    place = f"{folder.rpartition('/')[2]}/{file}:{frames[-1].lineno}"
    return f"{type(error).__name__} at {place}, {frames[-1].line!r}"


def few(names: Sequence[str]) -> str:
    """Return the first three names and the number of further ones."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def literals(annotation: Any) -> list[str]:
    """Return the words that an annotation allows, without None and types."""
    if typing.get_origin(annotation) is Literal:
        return [str(word) for word in typing.get_args(annotation)]
    return [word for part in typing.get_args(annotation) for word in literals(part)]


def sized(count: int) -> str:
    """Return a number of bytes as "1.50 GiB", or below 1 GiB as "512.00 MiB"."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
