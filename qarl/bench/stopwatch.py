"""Seconds that a phase's work takes, not its launch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qarl.learner.stopwatch import Stopwatch


class SynchronizedStopwatch(Stopwatch):
    """Waits for the CUDA device at both ends of a phase, which takes time itself. On CPUs it is a
    `Stopwatch`.
    """

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase. Phases do not nest."""
        synchronize()
        with super().__call__(phase):
            yield
            synchronize()


def synchronize() -> None:
    """Wait until the CUDA device has done all that was launched; return at once where there is
    none.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
