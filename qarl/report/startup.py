"""Start-up as a person sees it: what is done now and, when it is done, the seconds it took."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_listeners: list[tuple[Console, float]] = []


@contextmanager
def phases_shown_on(console: Console, after: float = 0) -> Iterator[None]:
    """Phases within this context are printed on `console`, those alone that take longer than `after` seconds; without
    one they pass in silence."""
    _listeners.append((console, after))
    try:
        yield
    finally:
        _listeners.pop()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """One phase of start-up: its name at once, or after the seconds of `phases_shown_on`; at its end, on the same line,
    its wall seconds."""
    if not _listeners:
        yield
        return
    (console, after), start = _listeners[-1], time.perf_counter()
    shown = threading.Event()

    def tell() -> None:
        console.print(f"{name} … ", end="", highlight=False, markup=False)
        console.file.flush()
        shown.set()

    waiting = threading.Timer(after, tell)
    waiting.start() if after else tell()
    try:
        yield
    except BaseException:
        _stop(waiting)
        if shown.is_set():
            console.print()
        raise
    _stop(waiting)
    if shown.is_set():
        console.print(f"{time.perf_counter() - start:.1f} s", highlight=False)


def _stop(waiting: threading.Timer) -> None:
    """Its line is printed, or never is."""
    waiting.cancel()
    if waiting.is_alive():
        waiting.join()


def say(line: str) -> None:
    """One line for the person who started the run; nothing where nobody listens."""
    if _listeners:
        _listeners[-1][0].print(line, soft_wrap=True, markup=False, highlight=False)
