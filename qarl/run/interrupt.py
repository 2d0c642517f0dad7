"""Signals that are handled otherwise for a while; Ctrl-C that lets the step in hand finish."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qarl.quant.runtime.parent import rank


@contextmanager
def handled(handlers: Mapping[int, Callable[..., Any] | int]) -> Iterator[None]:
    """Signals have these handlers, by number, and afterwards those they had."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Yields a list that a first Ctrl-C makes non-empty, and says so at once; a second one
    interrupts.
    """
    flag: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        flag.append(number)
        if rank() == 0:  # by the system's call: a handler may interrupt a print
            os.write(
                2,
                b"\nfinishing the step in hand and writing a checkpoint; Ctrl-C again stops at"
                b" once\n",
            )
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with handled({signal.SIGINT: on_interrupt}):
        yield flag
