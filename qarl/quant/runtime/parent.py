"""This process and what started it: its place in a launcher's environment, and its end with it.
Imports no torch.
"""

import ctypes
import os
import signal
import threading
import time


def launched() -> bool:
    """Whether a launcher started this process as one of several, or as the only one of its kind."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def rank() -> int:
    """This process's number in its run, from 0."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """Processes of the run, on all machines."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_world_size() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def end_with_the_parent(number: int = signal.SIGTERM) -> None:
    """In a child: ask for this signal should the process that started it be killed (Linux's
    PR_SET_PDEATHSIG).
    """
    ctypes.CDLL(None).prctl(1, number)


def end_group_with_the_parent() -> None:
    """Kill this process and the group it leads once the one that started it is gone, by a thread
    that looks.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
