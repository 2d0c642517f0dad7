"""Peak memory of one learner step, from the kernel's own high-water mark.

This module imports nothing heavy, because TRL's worker reads it too.

On Linux CPUs the mark is VmHWM of /proc/self/status, reset by writing 5 to /proc/self/clear_refs:
it is exact, and free while the step runs. Memory that the allocator retained from earlier steps
would hide the step's own use, so it is returned to the system first (malloc_trim). On CUDA the mark
is torch's count of allocated bytes.
"""

import ctypes
import gc
from pathlib import Path


class StepMemory:
    """Peak memory of a step: call `begin()` just before it and `end()` right after.

    Then `step` and `total` are set, both in bytes. The baseline is the memory resident when this
    object was created, before any model was built. `step` is the peak above the use at `begin()`;
    `total` is the peak above the baseline, so it includes masters, optimizer state and low-bit
    tensors.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self.step = self.total = 0
        self._give_back()
        self._baseline = self._now()

    def begin(self) -> None:
        """Return free memory to the system, and reset the mark to the memory still in use."""
        self._give_back()
        if self._cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self._before = self._now()

    def end(self) -> None:
        """Read the mark."""
        peak = self._peak()
        self.step = peak - self._before
        self.total = peak - self._baseline

    def _give_back(self) -> None:
        gc.collect()
        if not self._cuda:
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def _now(self) -> int:
        if self._cuda:
            import torch

            return torch.cuda.memory_allocated()
        return _status("VmRSS")

    def _peak(self) -> int:
        if self._cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        return _status("VmHWM")


def _status(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; peak memory is measured on Linux")
