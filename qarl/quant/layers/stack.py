"""Linear layers of one input that are multiplied as one: q, k and v; gate and up.

The engine does the same. One kernel multiplies all rows. It has the shape of the engine's, so the
choice of kernel and the order of summation are the engine's too, and the input is quantized once.
Masters, codes, names and gradients remain each layer's own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.kernels.ranks import row_parallel
from qarl.quant.kernels.reference import SideBySide
from qarl.quant.layers.linear import LowBitLinear, multiply


class LinearStack:
    """Linear layers of one input, multiplied by one kernel.

    Args:
        name: the engine's name of the stack ("model.layers.0.self_attn.qkv_proj").
        parts: the layers in the engine's order, all in one scheme.
        like: vLLM's module, if it has a dtype or a forward of its own.
    """

    def __init__(self, name: str, parts: Sequence[LowBitLinear], like: Any = None):
        self.name = name
        self.parts = tuple(parts)
        self._like = like
        self._kernel: LowBitMatmul | None = None
        self._versions: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all parts: compute dtype [..., I] → [..., O of all parts]."""
        return multiply(self.parts, self.kernel, x)

    @property
    def kernel(self) -> LowBitMatmul:
        """The kernel over the parts' present weight versions; see `LowBitLayer.kernel`."""
        if not self.parts[0].context.multiplies_codes:
            return SideBySide([part.kernel for part in self.parts], name="plain")
        context = self.parts[0].context
        versions = tuple(part.version for part in self.parts)
        if self._kernel is not None and versions == self._versions and context.keeps_kernels:
            return self._kernel
        if versions != self._versions:
            self._kernel = None  # freed before the next is made, so memory holds one at a time
        weights = [part.codes_or_shapes for part in self.parts]
        with torch.no_grad():
            biases = [part.low_bit_bias for part in self.parts]
            kernel = row_parallel(
                context.factory, self.parts[0].ranks, self.name, weights, biases, self._like
            )
        if context.keeps_kernels:
            self._kernel = kernel
            self._versions = versions
        return kernel

    def release_kernel(self) -> None:
        """Free the kernel; see `LowBitLayer.release_kernel`."""
        self._kernel = None


def fuse_scales(together: Iterable[Sequence[LowBitLinear]]) -> None:
    """Make layers that the engine stacks share one tensor-wide scale, if their scheme needs it.

    That is the case if `Scheme.fuses_scales`. Otherwise the engine would multiply k and v with the
    scale of q.

    Args:
        together: the layers of each stack.
    """
    for parts in together:
        for part in parts:
            if part.scheme.fuses_scales:
                part.fuse_with([other for other in parts if other is not part])
