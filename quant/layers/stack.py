"""Linear layers of one input, multiplied as one, as the engine multiplies them: q, k and v; gate and up.

One kernel over all rows, of the shape the engine's has, so kernel choice and summation order are the engine's too; and
one quantization of the input. Masters, codes, names and gradients stay each layer's own.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.layers.linear import LowBitLinear, Multiplied


class LinearStack:
    """name: the engine's of the whole ("model.layers.0.self_attn.qkv_proj"). parts: in the engine's order, all in one
    scheme."""

    def __init__(self, name: str, parts: Sequence[LowBitLinear]):
        self.name = name
        self.parts = tuple(parts)
        self._kernel: LowBitMatmul | None = None
        self._versions: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x: compute dtype [..., I] → each part's output, compute dtype [..., O of the part]."""
        context = self.parts[0].context
        if not context.multiplies_codes:
            return tuple(part(x) for part in self.parts)
        flat = x.detach().reshape(-1, x.shape[-1])
        kept = self.parts[0].kept_input(flat) if torch.is_grad_enabled() else ()
        with torch.no_grad():
            outputs = self.product(flat).split([part.out_features for part in self.parts], dim=-1)
        return tuple(part(x, Multiplied(kept, y)) for part, y in zip(self.parts, outputs, strict=True))

    @property
    def product(self) -> LowBitMatmul:
        """The parts' present weight versions in the kernel's own layout; see `LowBitLayer.product`."""
        context, versions = self.parts[0].context, tuple(part.version for part in self.parts)
        if self._kernel is not None and versions == self._versions and context.keeps_products:
            return self._kernel
        if versions != self._versions:
            self._kernel = None  # before the next is made
        weights = [part.to_prepare for part in self.parts]
        with torch.no_grad():
            kernel = context.factory.linear(self.name, weights, [part.low_bit_bias for part in self.parts])
        if context.keeps_products:
            self._kernel, self._versions = kernel, versions
        return kernel

    def release_product(self) -> None:
        """See `LowBitLayer.release_product`."""
        self._kernel = None


def stack_linears(linears: Mapping[str, LowBitLinear], stacked: Mapping[str, Sequence[str]]) -> dict[str, LinearStack]:
    """The stacks among a model's linear layers, by name.

    linears: all of a model's, by checkpoint name. stacked: `Family.stacked`.
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
