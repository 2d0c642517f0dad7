"""Whether vLLM's compiled operators for CPUs could be loaded."""

from importlib import import_module

import torch
from vllm.platforms import current_platform

from qarl.configs.errors import InstallError

REMEDY = "install the library that is missing (Debian, Ubuntu: apt install libnuma1)"


def operators_fault() -> str | None:
    """Return why vLLM's operators for CPUs cannot be loaded, in the loader's words, or None.

    vLLM 0.32 warns of it once and goes on, so that the first operator is then unknown to torch.
    """
    if not current_platform.is_cpu():
        return None
    import_module("vllm._custom_ops")  # loads them
    if hasattr(torch.ops._C, "rms_norm"):
        return None
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    else:
        name = "_C"
    try:
        import_module(f"vllm.{name}")  # as vLLM did, for the error that it did not raise
    except ImportError as error:
        return str(error)
    return "they have no 'rms_norm'"


def require_operators() -> None:
    """Raise `InstallError` if vLLM's operators for CPUs cannot be loaded."""
    fault = operators_fault()
    if fault is not None:
        raise InstallError(f"vLLM's compiled operators cannot be loaded: {fault}; {REMEDY}")
