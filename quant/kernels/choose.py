"""Choosing the kernel family. `auto` is vLLM where it is importable, else torch; the choice is always reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.base import KernelError, KernelFactory, LowBitMatmul
from qarl.quant.kernels.experts_loop import ExpertsLoop
from qarl.quant.kernels.plain import dequantized_matmul
from qarl.quant.kernels.torch_ops import TorchMatmul, torch_matmul
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.runtime.libraries import has_vllm

KERNELS = ("auto", "vllm", "torch", "reference")


@dataclass(frozen=True)
class TorchFactory:
    """Dense products by `linear`, those of stacks and experts one after another."""

    linear: Callable[[str, LowBitWeight, torch.Tensor | None], LowBitMatmul]

    def __call__(self, layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> LowBitMatmul:
        """See `KernelFactory`."""
        return self.linear(layer, weight, bias)

    def stacked(self, name: str, weights: Sequence[LowBitWeight], biases: Sequence[torch.Tensor | None]) -> TorchMatmul:
        """See `KernelFactory.stacked`."""
        parts = [self.linear(name, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return TorchMatmul(parts[0].name, lambda x: torch.cat([part(x) for part in parts], dim=-1), None)

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> ExpertsLoop:
        """See `KernelFactory.experts`."""
        pairs = [
            (
                self.linear(f"{layer}.{e}.{shape.layout.gate}", expert.gate_up, None),
                self.linear(f"{layer}.{e}.{shape.layout.down}", expert.down, None),
            )
            for e, expert in enumerate(weights.experts)
        ]
        return ExpertsLoop(pairs, shape.activation)


def make_factory(kernel: str, dtype: torch.dtype) -> KernelFactory:
    """A factory for `kernel` (one of KERNELS) computing in `dtype`. Raises `KernelError` where it cannot run."""
    if kernel == "auto":
        kernel = "vllm" if has_vllm() else "torch"
    if kernel == "vllm":
        if not has_vllm():
            raise KernelError("learner.kernel 'vllm' needs vllm in the learner's environment; use 'torch' or 'auto'")
        from qarl.quant.kernels.vllm import VllmFactory

        return VllmFactory(dtype)
    if kernel == "torch":
        return TorchFactory(torch_matmul)
    if kernel == "reference":
        return TorchFactory(lambda layer, weight, bias: dequantized_matmul(weight, bias, dtype))
    raise KernelError(f"unknown kernel {kernel!r}: known are {', '.join(map(repr, KERNELS))}")
