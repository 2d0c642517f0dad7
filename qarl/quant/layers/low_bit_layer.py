"""What linear layers and routed experts have in common: masters, one weight version of them, and
its kernel.
"""

from typing import Generic, TypeVar

import torch
from torch import nn

from qarl.quant.kernels.activations import multiplied_activation
from qarl.quant.kernels.base import ExpertsMatmul, LowBitMatmul
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.lora import Adapter
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import LowBitActivation
from qarl.quant.materialize.code_changes import quantized_weights
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.runtime.shards import shard_of
from qarl.quant.schemes import Scheme

Codes = TypeVar("Codes", LowBitWeight, LowBitExperts)
Kernel = TypeVar("Kernel", LowBitMatmul, ExpertsMatmul)


class LowBitLayer(nn.Module, Generic[Codes, Kernel]):
    """A layer that multiplies one weight version of its masters.

    layer: checkpoint name. scheme: of this layer, `bf16` where it is left alone. context: the
    model's. masters: what is materialized, and trained unless it has an adapter. adapters: what is
    trained instead of each master (`quant.model.add_lora.add_adapters`), or None. low_bit: codes
    and scales of this version, None before the first `refresh`; where codes are not kept, shapes,
    and the scales of the version that they were let go of with. keeps_scales: whether versions are
    made with the scales of the one before (`quant.model.kept_scales`). moves: by a master's place,
    what is added to it before it is rounded (an unaligned learner's `start_from_codes`). version:
    how many there were.
    """

    def __init__(self, layer: str, scheme: Scheme, context: LayerContext, *masters: nn.Parameter):
        super().__init__()
        self.layer = layer
        self.scheme = scheme
        self.context = context
        self.masters = masters
        self.adapters: list[Adapter | None] = [None] * len(masters)
        self.low_bit: Codes | None = None
        self.version = 0
        self.keeps_scales = False
        self.moves: dict[int, torch.Tensor] = {}
        self._kernel: Kernel | None = None
        self._plain: Kernel | None = None

    def adapt(self, place: int, adapter: Adapter) -> None:
        """Train these factors instead of the master at that place."""
        self.adapters[place] = adapter
        self.add_module(f"adapter_{place}", adapter)

    def _materialize(self, out: Codes | None) -> Codes:
        """Codes of the masters' present values, in the buffers of `out` where it is given."""
        raise NotImplementedError

    def keep_scales(self) -> None:
        """Make versions with the scales of the one before, where weights are quantized."""
        self.keeps_scales = self.scheme.weights is not None

    def _kept_scales(self) -> list[torch.Tensor | None]:
        """The scales to materialize each master with; None where they are those of its extremes."""
        kept = (
            [weight.scale for weight in quantized_weights(self.low_bit)]
            if self.keeps_scales
            else []
        )
        return [*kept] or [None] * len(self.masters)

    def _prepare(self, low_bit: Codes) -> Kernel:
        """The engine's kernel over these codes."""
        raise NotImplementedError

    def _cast(self) -> Kernel:
        """The masters' present values in the compute dtype."""
        raise NotImplementedError

    @torch.no_grad()
    def refresh(self) -> None:
        """Materialize the masters' present values, into the buffers of the version before: whatever
        still points to those tensors then sees the new version. Where codes are not kept, `codes`
        does so. The kernel is prepared by the next use of `product`.
        """
        self._kernel = None
        if self.context.keeps_codes:
            self.low_bit = self._materialize(self.low_bit)
        self.version += 1
        self.recast()  # now, for the masters may have moved on by the next forward

    @torch.no_grad()
    def recast(self) -> None:
        """Cast an unaligned layer's masters anew, to the dtype of a forward that has changed."""
        if not self.context.aligned:
            self._plain = None
            self._plain = self._cast()

    def codes(self) -> Codes:
        """Codes and scales of this version. Where they are not kept they are made again, to the
        same bits as long as the masters stand still, which they do until the next version; all
        processes that share them come here together.
        """
        if self.low_bit is None:
            raise RuntimeError(
                f"layer {self.layer!r} was never materialized: call LowBitModel.refresh() first"
            )
        if self.context.keeps_codes:
            return self.low_bit
        with torch.no_grad():
            return self._materialize(None)

    def release_codes(self) -> None:
        """Let go of this version's, whose context does not keep them."""
        self.low_bit = self.codes().without_codes()  # type: ignore[assignment]

    @property
    def to_prepare(self) -> Codes:
        """What a kernel is prepared over: shapes alone where the engine's layers hold the codes."""
        return self.codes() if self.context.engine is None or self.low_bit is None else self.low_bit

    @property
    def product(self) -> Kernel:
        """This weight version in the kernel's own layout: the engine's layer where it is shared,
        else a second copy, built at first use, so that publishing and exporting alone do without.
        Raises `KernelError` where the kernel family has none.
        """
        if not self.context.multiplies_codes:
            return self._cast() if self._plain is None else self._plain
        if self._kernel is not None and self.context.keeps_products:
            return self._kernel
        with torch.no_grad():
            kernel = self._prepare(self.to_prepare)
        if self.context.keeps_products:
            self._kernel = kernel
        return kernel

    def release_product(self) -> None:
        """Give the kernel's copy back; the next forward builds it. An unaligned layer's cast, its
        weight, stays.
        """
        self._kernel = None

    def merged(self) -> tuple[torch.Tensor, ...]:
        """What a learner learns: each master with its adapter's product added where it has one, in
        the master's dtype and shape, so this process's rows of it; copied to the context's device
        from wherever it waits.
        """
        there = [
            master.detach().to(device=self.context.device, non_blocking=True)
            for master in self.masters
        ]
        return tuple(
            base if adapter is None else adapter.merge(base, shard_of(master))
            for master, base, adapter in zip(self.masters, there, self.adapters, strict=True)
        )

    def to_round(self) -> tuple[torch.Tensor, ...]:
        """What is rounded to codes: `merged`, moved by `moves` in fp32."""
        return tuple(
            w + self.moves[index] if index in self.moves else w
            for index, w in enumerate(self.merged())
        )

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """A and B of every adapter, in the masters' order."""
        return tuple(
            f
            for adapter in self.adapters
            if adapter is not None
            for f in (adapter.lora_A, adapter.lora_B)
        )

    @property
    def quantizes_activations(self) -> bool:
        """Whether inputs are quantized before they are multiplied."""
        return self.context.multiplies_codes and self.scheme.activations is not None

    def kept_input(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the backward keeps of an input [N, I]: codes and scales, 4 to 9 bits a value, where
        those are what is multiplied, else the input itself.
        """
        return multiplied_activation(x, self.scheme).tensors if self.quantizes_activations else (x,)


def multiplied_input(
    kept: tuple[torch.Tensor, ...] | list[torch.Tensor],
) -> torch.Tensor | LowBitActivation:
    """The input as it was multiplied, of what `LowBitLayer.kept_input` kept."""
    return kept[0] if len(kept) == 1 else LowBitActivation(*kept)
