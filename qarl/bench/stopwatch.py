"""Stopwatch that times a phase's work on the GPU, not only its launch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qarl.learner.stopwatch import Stopwatch


class SynchronizedStopwatch(Stopwatch):
    """Stopwatch that waits for the CUDA device at both ends of a phase, which itself takes time.

    On CPUs it is a plain `Stopwatch`.
    """

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase. Phases do not nest."""
        synchronize()
        with super().__call__(phase):
            yield
            synchronize()


def synchronize() -> None:
    """Wait until the CUDA device has done all that was launched; without one, return at once."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
