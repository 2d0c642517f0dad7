"""Start-up as a person sees it: what is done now and, when it is done, the seconds it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_listeners: list[Console] = []


@contextmanager
def phases_shown_on(console: Console) -> Iterator[None]:
    """Phases within this context are printed on `console`; without one they pass in silence."""
    _listeners.append(console)
    try:
        yield
    finally:
        _listeners.pop()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """One phase of start-up: its name at once; at its end, on the same line, its wall seconds."""
    if not _listeners:
        yield
        return
    console, start = _listeners[-1], time.perf_counter()
    console.print(f"{name} … ", end="", highlight=False, markup=False)
    console.file.flush()
    try:
        yield
    except BaseException:
        console.print()
        raise
    console.print(f"{time.perf_counter() - start:.1f} s", highlight=False)


def say(line: str) -> None:
    """One line for the person who started the run; nothing where nobody listens."""
    if _listeners:
        _listeners[-1].print(line, soft_wrap=True, markup=False, highlight=False)
