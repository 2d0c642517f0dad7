"""Seconds that are a phase's work, and not its launch."""

import time

import torch

from qarl.learner.stopwatch import Stopwatch


class SynchronizedStopwatch(Stopwatch):
    """Waits for the CUDA device at both ends of a phase, which costs time of its own; on CPUs it changes nothing."""

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
