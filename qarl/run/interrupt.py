"""Ctrl-C that lets the step in hand finish."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Yields a list that a first Ctrl-C makes non-empty; a second one interrupts at once."""
    flag: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        flag.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
