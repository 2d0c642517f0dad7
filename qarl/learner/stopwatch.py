"""A stopwatch that measures the wall time of a learner step by phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Stopwatch with phases.

    `with watch("forward"): …` adds to a phase, and `take()` returns the seconds. It does not wait
    for CUDA, so there the seconds are those of launching a phase's work.

    entered: called with each phase's name as it begins.
    """

    def __init__(self, entered: Callable[[str], None] | None = None) -> None:
        self._entered = entered
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside the `with` to a phase. Phases do not nest."""
        if self._entered:
            self._entered(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and reset them."""
        seconds = dict(self._seconds)
        self._seconds = defaultdict(float)
        return seconds
