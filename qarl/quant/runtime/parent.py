"""Relation of this process to the one that started it.

This module reads the launcher's environment, ends a process when its parent ends, and lets it leave
signals to its parent. It does not import torch.
"""

import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Iterable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run (`qarl.run.interrupt`)."""


def launched() -> bool:
    """Return whether a launcher started this process, alone or as one of several."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def rank() -> int:
    """Return this process's number in its run, from 0."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """Return the number of processes of the run, on all machines."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_world_size() -> int:
    """Return the number of processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def end_with_the_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent ends.

    number: the signal. Uses Linux's PR_SET_PDEATHSIG.
    """
    # 1 is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, number)


def end_with_the_parent_alone() -> None:
    """Block `STOP_SIGNALS` in this process and in those that it starts, and have the kernel kill it
    when its parent ends. The parent ends it by SIGKILL.

    A mask outlives the start of a program, which a handler does not, and holds for libraries that
    install handlers of their own.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    end_with_the_parent(signal.SIGKILL)


def end_group_with_the_parent() -> None:
    """Start a thread that kills this process and the group it leads when its parent is gone.

    The thread checks twice a second.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def leave_stop_signals_to_the_parent() -> None:
    """Let this process live through `STOP_SIGNALS`, which a scheduler may send to all processes of
    a job. The parent decides when this process ends, and kills it then.
    """

    def ignore(number: int, frame: object) -> None:
        """Do nothing. SIG_IGN would be passed on to programs that this process starts."""

    for number in STOP_SIGNALS:
        signal.signal(number, ignore)
    keep_from_forks([ignore])


def keep_from_forks(handlers: Iterable[object]) -> None:
    """Give processes that this one forks the default action of `STOP_SIGNALS` where it has one of
    these handlers, because whoever forks a process may end it by SIGTERM.
    """
    _kept_from_forks.extend(handlers)
    _watch_forks()


def let_forks_have(handlers: Iterable[object]) -> None:
    """Undo `keep_from_forks`."""
    for handler in handlers:
        _kept_from_forks.remove(handler)


_kept_from_forks: list[object] = []
_masks: list[set[int]] = []


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


def _before_fork() -> None:
    # A fork that is ended at once must not lose the signal before it has the default action.
    _masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)))


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _after_fork_in_child() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) in _kept_from_forks:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    _after_fork()
