"""Clock of a training that leaves its evaluations out; every trainer uses the same one."""

import time

import psutil

from benchmarks.train.job import Curve, Point


class Clock:
    """Clock of seconds and CPU seconds.

    Call `evaluated` before the first step, `begin` when that step begins, and then `evaluate` and
    `evaluated` around every evaluation.
    """

    def __init__(self, samples: int) -> None:
        """Create the clock. samples: completions per step."""
        self._samples = samples
        self._points: list[Point] = []
        self._begin: float | None = None
        self._left_out = self._cpu_left_out = 0.0
        self._startup = 0.0

    def begin(self) -> None:
        """Start the clock at the first step; later calls do nothing."""
        if self._begin is None:
            self._startup = time.time() - psutil.Process().create_time()
            self._begin = time.perf_counter()
            self._cpu_begin = time.process_time()

    def evaluate(self) -> None:
        """Stop the clock for an evaluation."""
        self._paused = time.perf_counter()
        self._cpu_paused = time.process_time()

    def evaluated(self, step: int, accuracy: float) -> None:
        """Record the evaluation's accuracy and let the clock run on."""
        if self._begin is None:
            self._points.append(
                Point(
                    step=step,
                    samples=0,
                    seconds=0.0,
                    cpu_seconds=0.0,
                    accuracy=accuracy,
                )
            )
            return
        seconds = self._paused - self._begin - self._left_out
        cpu_seconds = self._cpu_paused - self._cpu_begin - self._cpu_left_out
        samples = step * self._samples
        self._points.append(
            Point(
                step=step,
                samples=samples,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                accuracy=accuracy,
            )
        )
        self._left_out += time.perf_counter() - self._paused
        self._cpu_left_out += time.process_time() - self._cpu_paused

    def curve(self) -> Curve:
        """Return the training's curve up to now."""
        return Curve(self._startup, tuple(self._points))
