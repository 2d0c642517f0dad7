"""Linear layers of one input, multiplied as one, as the engine multiplies them: q, k and v; gate
and up.

One kernel over all rows, of the shape the engine's has, so kernel choice and summation order are
the engine's too; and one quantization of the input. Masters, codes, names and gradients stay each
layer's own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.kernels.reference import SideBySide
from qarl.quant.layers.linear import LowBitLinear, multiply


class LinearStack:
    """name: the engine's of the whole ("model.layers.0.self_attn.qkv_proj"). parts: in the engine's
    order, all in one scheme. like: vLLM's module, where it has a dtype or a forward of its own.
    """

    def __init__(self, name: str, parts: Sequence[LowBitLinear], like: Any = None):
        self.name, self._like = name, like
        self.parts = tuple(parts)
        self._kernel: LowBitMatmul | None = None
        self._versions: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [..., I] → compute dtype [..., O of all parts]."""
        return multiply(self.parts, self.product, x)

    @property
    def product(self) -> LowBitMatmul:
        """The parts' present weight versions in the kernel's own layout; see
        `LowBitLayer.product`.
        """
        if not self.parts[0].context.multiplies_codes:
            return SideBySide([part.product for part in self.parts], name="plain")
        context, versions = (
            self.parts[0].context,
            tuple(part.version for part in self.parts),
        )
        if self._kernel is not None and versions == self._versions and context.keeps_products:
            return self._kernel
        if versions != self._versions:
            self._kernel = None  # before the next is made
        weights = [part.to_prepare for part in self.parts]
        with torch.no_grad():
            biases = [part.low_bit_bias for part in self.parts]
            kernel = context.factory.linear(self.name, weights, biases, self._like)
        if context.keeps_products:
            self._kernel, self._versions = kernel, versions
        return kernel

    def release_product(self) -> None:
        """See `LowBitLayer.release_product`."""
        self._kernel = None


def fuse_scales(together: Iterable[Sequence[LowBitLinear]]) -> None:
    """Tell layers that the engine stacks, and whose tensor-wide scale must agree then
    (`Scheme.fuses_scales`), of each other. Without this the engine would multiply k and v with the
    scale of q. together: the layers of each stack.
    """
    for parts in together:
        for part in parts:
            if part.scheme.fuses_scales:
                part.fuse_with([other for other in parts if other is not part])
