"""Kernels of low-bit weights. Each module here makes `LowBitMatmul`s from `LowBitWeight`s.

- `vllm`: the layer object that vLLM itself builds for the scheme, shape and platform.
- `engine_layers`: the layer object of the running engine, which already holds the weights.
- `reference`: dequantize, then multiply in the compute dtype (fake-quant arithmetic). For the
  unaligned baseline, multiply with the master cast to the compute dtype, with nothing quantized.
"""

import torch

from qarl.quant.kernels.base import KernelError, KernelFactory, LowBitMatmul
from qarl.quant.kernels.reference import ReferenceFactory
from qarl.quant.runtime.imports import collections_paused
from qarl.quant.runtime.libraries import has_vllm

KERNELS = ("auto", "vllm", "reference")
"""Kernel families. `auto` is vLLM if it can be imported, else the reference; the audit names it."""

__all__ = ["KERNELS", "KernelError", "KernelFactory", "LowBitMatmul", "make_factory"]


def make_factory(family: str, dtype: torch.dtype) -> KernelFactory:
    """Return the factory of a family of kernels, one of KERNELS, that compute in `dtype`.

    Raises `KernelError` if the family is unknown or cannot run.
    """
    if family not in KERNELS:
        raise KernelError(f"unknown kernel {family!r}: known are {', '.join(map(repr, KERNELS))}")
    if family == "vllm" and not has_vllm():
        raise KernelError(
            "learner.kernel 'vllm' needs vllm in the learner's environment; use 'reference' or"
            " 'auto'"
        )
    if family == "reference" or not has_vllm():
        return ReferenceFactory(dtype)
    with collections_paused():
        from qarl.quant.kernels.vllm import VllmFactory

    return VllmFactory(dtype)
