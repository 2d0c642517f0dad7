"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import threading
import time


def end_with_the_parent(number: int = signal.SIGTERM) -> None:
    """Have the system send this process a signal should the one that started it be killed (Linux's PR_SET_PDEATHSIG).
    Called in the child."""
    ctypes.CDLL(None).prctl(1, number)


def end_group_with_the_parent() -> None:
    """Kill this process and the group it leads once the one that started it is gone, by a thread that looks."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
