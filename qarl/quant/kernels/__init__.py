"""How a low-bit product is computed. Each module makes `LowBitMatmul`s from a `LowBitWeight`:

`vllm`           the layer object vLLM itself builds for that scheme, shape and platform
`engine_layers`  that of the running engine, which holds the weights already `reference`
dequantize, then multiply in the compute dtype (fake-quant arithmetic); or the master cast to the
                 compute dtype, nothing quantized (the unaligned baseline)
"""

import torch

from qarl.quant.kernels.base import KernelError, KernelFactory, LowBitMatmul
from qarl.quant.kernels.reference import ReferenceFactory
from qarl.quant.runtime.libraries import has_vllm

KERNELS = ("auto", "vllm", "reference")
"""Families; `auto` is vLLM where it is importable, else the reference. The audit says which it
was.
"""

__all__ = ["KERNELS", "KernelError", "KernelFactory", "LowBitMatmul", "make_factory"]


def make_factory(kernel: str, dtype: torch.dtype) -> KernelFactory:
    """A factory for `kernel` (one of KERNELS) computing in `dtype`. Raises `KernelError` where it
    cannot run.
    """
    if kernel not in KERNELS:
        raise KernelError(f"unknown kernel {kernel!r}: known are {', '.join(map(repr, KERNELS))}")
    if kernel == "vllm" and not has_vllm():
        raise KernelError(
            "learner.kernel 'vllm' needs vllm in the learner's environment; use 'reference' or"
            " 'auto'"
        )
    if kernel == "reference" or not has_vllm():
        return ReferenceFactory(dtype)
    from qarl.quant.kernels.vllm import VllmFactory

    return VllmFactory(dtype)
