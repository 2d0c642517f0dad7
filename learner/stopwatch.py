"""Where the wall time of a learner step goes, by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """`with watch("forward"): …` adds to that phase; `take()` hands over the seconds and starts anew.

    synchronize: wait for the CUDA device at both ends of a phase, so that seconds are its work's and not its launch's.
    Waiting costs time of its own; a benchmark does. It changes nothing on CPUs.
    entered: called with each phase's name as it begins.
    """

    def __init__(self, entered: Callable[[str], None] | None = None, synchronize: bool = False) -> None:
        self._synchronize = synchronize
        self._entered = entered
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def synchronized(self) -> None:
        """Wait for the device from here on."""
        self._synchronize = True

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Phases do not nest."""
        if self._entered:
            self._entered(phase)
        start = self._now()
        try:
            yield
        finally:
            self._seconds[phase] += self._now() - start

    def take(self) -> dict[str, float]:
        """Phase → seconds since the last call."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _now(self) -> float:
        if self._synchronize and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
