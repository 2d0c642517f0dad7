"""Relation of this process to the one that started it.

This module reads the launcher's environment, and ends a process when its parent ends. It does not
import torch.
"""

import ctypes
import os
import signal
import threading
import time


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
