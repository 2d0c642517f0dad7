"""Temporary signal handlers, and a Ctrl-C that lets the present step finish."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qarl.quant.runtime.parent import rank


@contextmanager
def handled(handlers: Mapping[int, Callable[..., Any] | int]) -> Iterator[None]:
    """Install these handlers, by signal number, and restore the earlier ones at the end."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Yield a list to which a first Ctrl-C appends, with a message; a second one interrupts."""
    flag: list[int] = []

    def on_interrupt(number: int, frame: object) -> None:
        flag.append(number)
        if rank() == 0:  # os.write, not print: the handler may interrupt a print
            os.write(
                2,
                b"\nfinishing the step in hand and writing a checkpoint; Ctrl-C again stops at"
                b" once\n",
            )
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with handled({signal.SIGINT: on_interrupt}):
        yield flag
