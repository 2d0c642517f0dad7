"""Where the wall time of a learner step goes, by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with watch("forward"): …` adds to that phase; `take()` hands over the seconds and starts
    anew. On CUDA, which is not waited for, they are those of what launches a phase's work. entered:
    called with each phase's name as it begins.
    """

    def __init__(self, entered: Callable[[str], None] | None = None) -> None:
        self._entered = entered
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Phases do not nest."""
        if self._entered:
            self._entered(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Phase → seconds since the last call."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
