"""Linear layers of one input, multiplied as one, as the engine multiplies them: q, k and v; gate and up.

One kernel over all rows, of the shape the engine's has, so kernel choice and summation order are the engine's too; and
one quantization of the input. Masters, codes, names and gradients stay each layer's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.layers.linear import LowBitLinear, multiply


class _SideBySide:
    """Masters of one input in the compute dtype, each multiplied alone, the outputs one after the other."""

    name = "plain"

    def __init__(self, products: Sequence[Any]):
        self._products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: floating [N, I] → its dtype [N, O of all]."""
        return torch.cat([product(x.to(product.weight.dtype)) for product in self._products], dim=-1).to(x.dtype)


class LinearStack:
    """name: the engine's of the whole ("model.layers.0.self_attn.qkv_proj"). parts: in the engine's order, all in one
    scheme. like: vLLM's module, where it has a dtype or a forward of its own."""

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
        """The parts' present weight versions in the kernel's own layout; see `LowBitLayer.product`."""
        if not self.parts[0].context.multiplies_codes:
            return _SideBySide([part.product for part in self.parts])
        context, versions = self.parts[0].context, tuple(part.version for part in self.parts)
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


def stack_linears(linears: Mapping[str, LowBitLinear], stacked: Mapping[str, Sequence[str]]) -> dict[str, LinearStack]:
    """The stacks among a model's linear layers, by name.

    linears: all of a model's, by checkpoint name. stacked: what the engine multiplies as one → its parts.
    """
    stacks = {}
    for whole, leaves in stacked.items():
        for name in linears:
            parent, dot, leaf = name.rpartition(".")
            parts = [linears.get(f"{parent}{dot}{part}") for part in leaves]
            present = [part for part in parts if part is not None]
            if leaf == leaves[0] and len(present) == len(leaves):
                stacks[f"{parent}{dot}{whole}"] = LinearStack(f"{parent}{dot}{whole}", present)
    return stacks


def fuse_scales(stacks: Iterable[LinearStack]) -> None:
    """Tell layers that the engine stacks, and whose tensor-wide scale must agree then (`Scheme.fuses_scales`), of each
    other. Without this the engine would multiply k and v with the scale of q."""
    for stack in stacks:
        for part in stack.parts:
            if part.scheme.fuses_scales:
                part.fuse_with([other for other in stack.parts if other is not part])
