"""Choosing the kernel family. `auto` is vLLM where it is importable, else torch; the choice is always reported."""

from importlib.util import find_spec
from typing import Protocol

import torch

from quant.materialize import LowBitWeight

KERNELS = ("auto", "vllm", "torch", "reference")


class KernelError(RuntimeError):
    """The requested kernel family cannot run here, or not for this scheme."""


class Product(Protocol):
    """One layer's prepared product. Holds whatever layout its kernel needs; never changes the low-bit tensors."""

    @property
    def name(self) -> str:
        """Which kernel multiplies."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O], bias included."""
        ...


class ProductFactory(Protocol):
    """Makes the products of a model's layers from their low-bit weights."""

    def __call__(self, layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> Product:
        """layer: checkpoint name. bias: compute dtype [O] or None."""
        ...


def make_factory(kernel: str, dtype: torch.dtype) -> ProductFactory:
    """A factory for `kernel` (one of KERNELS) computing in `dtype`. Raises `KernelError` where it cannot run."""
    if kernel == "auto":
        kernel = "vllm" if find_spec("vllm") else "torch"
    if kernel == "vllm":
        if not find_spec("vllm"):
            raise KernelError("learner.kernel 'vllm' needs vllm in the learner's environment; use 'torch' or 'auto'")
        from quant.kernels.vllm import VllmProductFactory

        return VllmProductFactory(dtype)
    if kernel == "torch":
        from quant.kernels.torch import torch_product

        return torch_product
    if kernel == "reference":
        from quant.kernels.reference import ReferenceProductFactory

        return ReferenceProductFactory(dtype)
    raise KernelError(f"unknown kernel {kernel!r}: known are {', '.join(map(repr, KERNELS))}")
