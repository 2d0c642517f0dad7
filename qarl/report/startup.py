"""Progress lines of start-up: the phase that runs now and, at its end, its duration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_listeners: list[Console] = []


@contextmanager
def phases_shown_on(console: Console) -> Iterator[None]:
    """Print phases within this context on `console`. Outside of it they print nothing."""
    _listeners.append(console)
    try:
        yield
    finally:
        _listeners.pop()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print a phase's name when it begins, and its wall time in seconds when it ends."""
    if not _listeners:
        yield
        return
    console = _listeners[-1]
    start = time.perf_counter()
    console.print(f"{name} … ", end="", highlight=False, markup=False)
    console.file.flush()
    try:
        yield
    except BaseException:
        console.print()
        raise
    console.print(f"{time.perf_counter() - start:.1f} s", highlight=False)


def say(line: str) -> None:
    """Print one line for the user, or nothing outside of `phases_shown_on`."""
    if _listeners:
        _listeners[-1].print(line, soft_wrap=True, markup=False, highlight=False)
