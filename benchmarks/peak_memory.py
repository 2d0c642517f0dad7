"""Peak resident memory of this process inside a `with` block."""

import threading
from types import TracebackType

import psutil

_EVERY_SECONDS = 0.002


class PeakMemory:
    """Context manager that measures the largest resident set above that at entry, in bytes.

    Use it as `with PeakMemory() as peak: …`, then read `peak.bytes`. A thread reads the kernel's
    count of resident pages every 2 ms, so allocations of any library count. Memory that lives for
    less time, or is never touched, may be missed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._start = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ):
        self._stop.set()
        self._thread.join()
        self._read()

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            self._read()

    def _read(self) -> None:
        self.bytes = max(self.bytes, self._process.memory_info().rss - self._start)
