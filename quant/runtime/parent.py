"""Processes that end with the one that started them."""

import ctypes
import signal


def end_with_the_parent(number: int = signal.SIGTERM) -> None:
    """Have the system send this process a signal should the one that started it be killed (Linux's PR_SET_PDEATHSIG).
    Called in the child."""
    ctypes.CDLL(None).prctl(1, number)
