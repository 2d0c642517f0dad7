"""Choosing the kernel family. `auto` is vLLM where it is importable, else torch; the choice is always reported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from quant.checkpoint.families import ExpertsShape
from quant.kernels.base import ExpertsProduct, KernelError, Product, ProductFactory
from quant.materialize import LowBitWeight
from quant.materialize.experts import LowBitExperts

KERNELS = ("auto", "vllm", "torch", "reference")


@dataclass(frozen=True)
class TorchFactory:
    """Dense products by `linear`; experts by torch's grouped operators where `grouped` asks and they exist, else as
    dense products one after another."""

    linear: Callable[[str, LowBitWeight, torch.Tensor | None], Product]
    grouped: bool = False

    def __call__(self, layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> Product:
        """See `ProductFactory`."""
        return self.linear(layer, weight, bias)

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> ExpertsProduct:
        """See `ProductFactory.experts`."""
        from quant.kernels.experts_loop import per_expert_product
        from quant.kernels.grouped import grouped_product

        grouped = grouped_product(shape, weights) if self.grouped else None
        return grouped or per_expert_product(self, layer, shape, weights)


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
        from quant.kernels.torch_ops import torch_product

        return TorchFactory(torch_product, grouped=True)
    if kernel == "reference":
        from quant.kernels.dequantized import ReferenceProductFactory

        return TorchFactory(ReferenceProductFactory(dtype))
    raise KernelError(f"unknown kernel {kernel!r}: known are {', '.join(map(repr, KERNELS))}")
