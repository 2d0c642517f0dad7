"""Whether vLLM's compiled operators for CPUs could be loaded."""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import torch
from vllm.platforms import current_platform

from qarl.configs.errors import InstallError

REMEDY = "install the library that is missing (Debian, Ubuntu: apt install libnuma1)"


def operators_fault() -> str | None:
    """Return why vLLM's operators for CPUs could not be loaded, in the loader's words, or None.

    vLLM 0.32 warns of it once and goes on, so that the first operator is then unknown to torch.
    """
    if not current_platform.is_cpu() or hasattr(torch.ops._C, "rms_norm"):
        return None
    spec = find_spec("vllm")
    (folder,) = (spec and spec.submodule_search_locations) or [""]
    for library in sorted(Path(folder).glob("_C*.so")):
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            return str(error)
    return "its library has no operator 'rms_norm'"


def require_operators() -> None:
    """Raise `InstallError` if vLLM's operators for CPUs could not be loaded."""
    fault = operators_fault()
    if fault is not None:
        raise InstallError(f"vLLM's compiled operators cannot be loaded: {fault}; {REMEDY}")
