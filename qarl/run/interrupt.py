"""Signals that stop a run: Ctrl-C, and those of schedulers, containers and terminals.

    SIGINT   Ctrl-C                      SIGHUP    the terminal is gone
    SIGTERM  scancel, docker stop, …     SIGUSR1   Slurm's --signal, before a time limit

While steps are done, the first one lets the step in hand finish and a checkpoint be written. Before
and after that, and the second time, it ends the run at once, by `Interrupted`. The exit status is
128 and the signal's number.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from qarl.quant.runtime.parent import STOP_SIGNALS, keep_from_forks, let_forks_have, rank

if TYPE_CHECKING:  # which imports torch
    from qarl.learner.processes import Processes

_ONE_STOP = 1.0
"""Seconds in which several signals are one.

A scheduler may send its signal to all processes of a job, and a launcher passes it on to some.
"""


class Interrupted(KeyboardInterrupt):
    """Raised where a signal stops the run at once."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number
        """Number of the signal."""


def signal_of(interrupt: KeyboardInterrupt) -> int:
    """Return the number of the signal that interrupted. Python's own Ctrl-C is SIGINT."""
    return interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT


@contextmanager
def handled(handlers: Mapping[int, Callable[..., Any] | int]) -> Iterator[None]:
    """Install these handlers, by signal number, and restore the earlier ones at the end.

    Processes that are forked meanwhile do not have them.
    """
    new = [handler for handler in handlers.values() if callable(handler)]
    keep_from_forks(new)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        let_forks_have(new)


def interrupt(number: int, frame: object = None) -> NoReturn:
    """Raise `Interrupted`: a handler of signals."""
    _let_go_of_a_lost_terminal(number)
    raise Interrupted(number)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let signals that would end the process without a word raise `Interrupted`, as Ctrl-C raises
    `KeyboardInterrupt`, so that what was opened is closed.
    """
    with handled({number: interrupt for number in heeded_signals() if number != signal.SIGINT}):
        yield


@contextmanager
def deferred_interrupt() -> Iterator[list[int]]:
    """Yield a list to which the first signal adds its number, with a message; another one, unless
    it comes within `_ONE_STOP` seconds, raises `Interrupted`.
    """
    received: list[int] = []
    when = 0.0

    def on_signal(number: int, frame: object) -> None:
        nonlocal when
        _let_go_of_a_lost_terminal(number)
        if received and time.monotonic() - when > _ONE_STOP:
            raise Interrupted(number)
        if received:
            return
        received.append(number)
        when = time.monotonic()
        if rank() == 0:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            words = (
                f"\n{name}: finishing the step in hand and writing a checkpoint; another signal"
                " stops at once\n"
            )
            os.write(2, words.encode())  # not print, which the handler may have interrupted

    with handled(dict.fromkeys(heeded_signals(), on_signal)):
        yield received


def agreed_signal(received: list[int], processes: "Processes") -> int | None:
    """Return the signal that one of the processes received, the same in all of them, or None."""
    return next((number for each in processes.all_gather(received) for number in each), None)


def heeded_signals() -> list[int]:
    """Return the signals that stop a run: all but a hang-up that `nohup` has it ignore."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


def _let_go_of_a_lost_terminal(number: int) -> None:
    """Discard later output that can no longer be written, after a hang-up."""
    for descriptor in (1, 2) if number == signal.SIGHUP else ():
        try:
            os.write(descriptor, b"")
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)
