"""Relation of this process to the one that started it.

This module reads the launcher's environment, ends a process when its parent ends, and lets it leave
signals to its parent. It does not import torch.
"""

import ctypes
import os
import signal
import threading
import time

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

    Processes that this one starts or forks are ended by them as ever, because a person's code may
    end its own by SIGTERM.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN not passed on to other programs
    masks: list[set[int]] = []

    def before() -> None:
        # a fork that is ended at once must not lose the signal before it has the default action
        masks.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)))

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
