"""The devices a run is planned for: this machine's, as the driver has them, or those of `--gpus`.
Without torch.
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
"""Lower-case name → memory, 10⁹ bytes as data sheets count. A100 of 80 GB."""

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
    """name: in words. device: "cuda" or "cpu". count: devices; 1 of CPUs, which all processes
    share. memory: bytes of each; of a CPU's what is available now, swap included. host: bytes
    available beside GPUs; None where unknown. taken: bytes that other processes have of a GPU now.
    """

    name: str
    device: str
    count: int
    memory: int
    host: int | None = None
    taken: int = 0

    def a_process(self, processes: int) -> int:
        """Bytes each of so many processes may take."""
        return self.memory if self.device == "cuda" else self.memory // processes


def has_avx512() -> bool:
    """Whether the CPU has; so where nobody can tell."""
    facts = cpu_facts()
    return not facts or "avx512f" in facts.get("flags", "")


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as its driver reports it. memory, free: bytes. capability: of CUDA."""

    index: str
    uuid: str
    name: str
    memory: int
    free: int
    capability: float
    driver: str


def parse_machine(text: str) -> Machine:
    """`8xH100`, or `8x80GB` for any GPU of that memory (10⁹ bytes each, as data sheets count).
    Raises `ConfigError`.
    """
    sized = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)gb", text.lower())
    if sized:
        return Machine(f"{sized[1]} × {sized[2]} GB", "cuda", int(sized[1]), int(sized[2]) * 10**9)
    named = re.fullmatch(r"([1-9]\d*)x(\w+)", text.lower())
    if not named or named[2] not in GPUS:
        kinds = ", ".join(name.upper() for name in GPUS)
        raise ConfigError(
            f"--gpus {text!r}: give a count and a kind, such as 8xH100, or 1x24GB; known are"
            f" {kinds}"
        )
    return Machine(
        f"{named[1]} × {named[2].upper()}",
        "cuda",
        int(named[1]),
        GPUS[named[2]] * 10**9,
    )


def planned_machine(gpus: str | None) -> Machine:
    """That of `--gpus`, else this one. Raises `ConfigError`."""
    return this_machine() if gpus is None else parse_machine(gpus)


def this_machine() -> Machine:
    """GPUs that torch would use, the smallest one's memory; else the CPU. Raises `ConfigError`
    where there are GPUs and CUDA_VISIBLE_DEVICES names none of them.
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
            " some"
        )
    if gpus:
        smallest, largest = (pick(gpus, key=lambda gpu: gpu.memory) for pick in (min, max))
        taken = max(gpu.memory - gpu.free for gpu in gpus)
        name = f"{len(gpus)} × {smallest.name}"
        if smallest.memory < largest.memory:
            name = f"{len(gpus)} GPUs, of which the smallest, {smallest.name}, counts"
        return Machine(name, "cuda", len(gpus), smallest.memory, host=available, taken=taken)
    return Machine("this machine's CPUs", "cpu", 1, available)


def available_memory() -> int:
    """Bytes of the host's memory that processes can still take, swap included, within the limits of
    control groups.
    """
    memory = psutil.virtual_memory().available + psutil.swap_memory().free
    return min([memory, *_group_limits()])


def _group_limits() -> list[int]:
    """What the control group leaves, page cache counted as free; nothing where there is no
    limit.
    """
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (
            (group / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
        cached = re.search(
            r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE
        )
        return [int(limit) - int(used) + (int(cached[1]) if cached else 0)]
    except (OSError, ValueError):  # no control groups of version 2, or "max"
        return []


def visible_gpus() -> list[DriverGpu]:
    """Those CUDA_VISIBLE_DEVICES leaves, all without it; none where there is no driver."""
    gpus, chosen = driver_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [
        gpu for gpu in gpus if any(name == gpu.index or gpu.uuid.startswith(name) for name in names)
    ]


def driver_gpus() -> list[DriverGpu]:
    """Every GPU `nvidia-smi` names; none where there is none, or it does not answer."""
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
            capability=float(compute),
            driver=driver,
        )
        for *names, memory, free, compute, driver in rows
    ]


def _bytes(mebibytes: str) -> int:
    """ "[N/A]" is of a GPU with the host's memory."""
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else available_memory()


def torch_is_for_cpus() -> bool:
    """Whether the torch that is installed can use no GPU."""
    return (installed("torch") or "+cpu").endswith("+cpu")
