"""The devices a run is planned for: this machine's, as the driver reports them, or `--gpus`.

Imports no torch.
"""

import csv
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from qarl.configs.errors import ConfigError
from qarl.quant.runtime.answers import cpu_facts, installed

GPUS = {"a100": 80, "l40s": 48, "h100": 80, "h200": 141, "b200": 180}
"""Memory of each GPU by its lower-case name, in units of 10⁹ bytes, as data sheets count.

An A100 is the one of 80 GB.
"""

_QUERY = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "compute_cap",
    "driver_version",
)


@dataclass(frozen=True)
class Machine:
    """The devices of one machine."""

    name: str
    """Description for a person, such as "8 × H100"."""

    device: str
    """Type of the devices: "cuda" or "cpu"."""

    count: int
    """Number of devices; 1 for CPUs, which all processes share."""

    memory: int
    """Bytes of one device; for CPUs the bytes available now, swap included."""

    host: int | None = None
    """Bytes of host memory available besides GPUs; None if unknown."""

    used: int = 0
    """Bytes of a GPU that other processes use now."""

    machines: int = 1
    """Number of such machines that the run has."""

    @property
    def devices(self) -> int:
        """Number of devices of all machines."""
        return self.machines * self.count

    def per_process(self, processes: int) -> int:
        """Return the bytes that each of `processes` processes may use."""
        return self.memory if self.device == "cuda" else self.memory // processes


def has_avx512() -> bool:
    """Return whether the CPU has AVX-512; True if that is unknown."""
    facts = cpu_facts()
    return not facts or "avx512f" in facts.get("flags", "")


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as its driver reports it."""

    index: str
    """Number among the machine's GPUs."""

    uuid: str
    """Unique identifier, "GPU-…"."""

    name: str
    """Product name."""

    memory: int
    """Total bytes."""

    free: int
    """Bytes that no process uses now."""

    capability: float | None
    """CUDA compute capability, such as 9.0; None if the driver does not say."""

    driver: str
    """Version of the driver."""


def parse_machine(text: str) -> Machine:
    """Parse `8xH100`, or `8x80GB` for any GPU of that memory; `4x8xH100` is four such machines.

    GB are 10⁹ bytes, as data sheets count. Raises `ConfigError` for any other text.
    """
    parts = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x(\w+)", text.lower())
    kind = parts[3] if parts else ""
    sized = re.fullmatch(r"([1-9]\d*)gb", kind)
    if not parts or not (sized or kind in GPUS):
        kinds = ", ".join(name.upper() for name in GPUS)
        raise ConfigError(
            f"--gpus {text!r}: give a count and a kind, such as 8xH100, or 1x24GB; known are"
            f" {kinds}; 4x8xH100 is four machines"
        )
    machines = int(parts[1] or 1)
    several = f"{machines} × " if machines > 1 else ""
    words = f"{sized[1]} GB" if sized else kind.upper()
    memory = int(sized[1]) if sized else GPUS[kind]
    return Machine(
        f"{several}{parts[2]} × {words}",
        "cuda",
        int(parts[2]),
        memory * 10**9,
        machines=machines,
    )


def planned_machine(gpus: str | None) -> Machine:
    """Return the machine that `--gpus` names, or this one if it is None. Raises `ConfigError`."""
    return this_machine() if gpus is None else parse_machine(gpus)


def this_machine() -> Machine:
    """Return the GPUs that torch would use, or the CPUs if there are none.

    If GPUs differ, the smallest one's memory counts. Raises `ConfigError` if there are GPUs and
    CUDA_VISIBLE_DEVICES names none of them.
    """
    available = available_memory()
    gpus = visible_gpus() if not torch_is_for_cpus() else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not gpus and not torch_is_for_cpus() and (hidden := len(driver_gpus())):
        slices = (
            "slices of GPUs (MIG) have not been tried; name"
            if "MIG" in chosen
            else "unset it, or name"
        )
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES {chosen!r} names none of this machine's {hidden} GPUs: {slices}"
            " some, each once (CUDA ignores what follows a name of no GPU)"
        )
    if gpus:
        smallest = min(gpus, key=lambda gpu: gpu.memory)
        largest = max(gpus, key=lambda gpu: gpu.memory)
        used = max(gpu.memory - gpu.free for gpu in gpus)
        name = f"{len(gpus)} × {smallest.name}"
        if smallest.memory < largest.memory:
            name = f"{len(gpus)} GPUs, of which the smallest, {smallest.name}, counts"
        return Machine(name, "cuda", len(gpus), smallest.memory, host=available, used=used)
    return Machine("this machine's CPUs", "cpu", 1, available)


def available_memory() -> int:
    """Return the bytes of host memory that processes can still allocate.

    Swap is included. The limits of control groups apply.
    """
    memory = psutil.virtual_memory().available + psutil.swap_memory().free
    return min([memory, *_group_limits()])


def _group_limits() -> list[int]:
    """Return the bytes that the control group leaves, or an empty list if it has no limit.

    Page cache counts as free, because the kernel gives it up under pressure.
    """
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = (group / "memory.stat").read_text()
        cached = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
        return [limit - used + (int(cached[1]) if cached else 0)]
    except (OSError, ValueError):  # no control groups of version 2, or "max"
        return []


def visible_gpus() -> list[DriverGpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order, or all if it is not set.

    As CUDA reads it, the first name of no GPU, or of several, ends the list, and a GPU that is
    named twice empties it. The list is empty if there is no driver.
    """
    gpus = driver_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    visible: list[DriverGpu] = []
    for name in map(str.strip, chosen.split(",")):
        is_uuid = name.startswith("GPU-")
        named = [
            gpu for gpu in gpus if name == gpu.index or (is_uuid and gpu.uuid.startswith(name))
        ]
        if len(named) != 1:
            break
        if named[0] in visible:
            return []
        visible += named
    return visible


def driver_gpus() -> list[DriverGpu]:
    """Return every GPU that `nvidia-smi` lists; none if it is missing or does not answer."""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_QUERY)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        row
        for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True)
        if len(row) == len(_QUERY)
    ]
    return [
        DriverGpu(
            *names,
            memory=_bytes(memory),
            free=_bytes(free),
            capability=_capability(compute),
            driver=driver,
        )
        for *names, memory, free, compute, driver in rows
    ]


def _capability(text: str) -> float | None:
    """Convert a compute capability; old drivers report "[N/A]", and broken GPUs other words."""
    return float(text) if re.fullmatch(r"\d+\.\d+", text) else None


def _bytes(mebibytes: str) -> int:
    """Convert MiB to bytes; "[N/A]" is reported for a GPU that shares the host's memory."""
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else available_memory()


def torch_is_for_cpus() -> bool:
    """Return whether the installed torch can use no GPU."""
    return (installed("torch") or "+cpu").endswith("+cpu")
