"""Peak memory of one learner step, by the kernel's own high-water mark.

Imports nothing heavy, for TRL's worker reads it too.

On Linux CPUs the mark is VmHWM of /proc/self/status, set back by writing 5 to
/proc/self/clear_refs: exact, and free while the step runs. Memory that the allocator kept from
earlier steps would hide the step's own use, so it is handed back to the system first (malloc_trim).
On CUDA it is torch's count of allocated bytes.
"""

import ctypes
import gc
from pathlib import Path


class StepMemory:
    """`begin()` just before a step, `end()` right after; then `step` and `total`.

    baseline: bytes resident when this object was made, before any model was built. step: highest
    use above that at `begin()`. total: highest use above the baseline, so masters, optimizer state
    and low-bit tensors count. Both bytes.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self.step = self.total = 0
        self._give_back()
        self._baseline = self._now()

    def begin(self) -> None:
        """Hand back what is free, and set the mark to what is left."""
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
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}; peak memory is measured on Linux")
