"""The base class of linear layers and routed experts: masters, a weight version, and its kernel."""

from typing import Generic, TypeVar

import torch
from torch import nn

from qarl.quant.kernels.activations import multiplied_activation
from qarl.quant.kernels.base import ExpertsMatmul, LowBitMatmul
from qarl.quant.layers.context import Forward, LayerContext
from qarl.quant.layers.lora import Adapter
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.activations import LowBitActivation
from qarl.quant.materialize.code_changes import quantized_weights
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.runtime.shards import own_rows, shard_of
from qarl.quant.schemes import Scheme

Codes = TypeVar("Codes", LowBitWeight, LowBitExperts)
Kernel = TypeVar("Kernel", LowBitMatmul, ExpertsMatmul)


class LowBitLayer(nn.Module, Generic[Codes, Kernel]):
    """Layer that multiplies one weight version of its masters.

    Every `refresh` makes a new version: the codes and scales of the masters' present values.
    """

    def __init__(self, layer: str, scheme: Scheme, context: LayerContext, *masters: nn.Parameter):
        super().__init__()
        self.layer = layer
        """The layer's name in checkpoints."""
        self.scheme = scheme
        """Scheme of this layer; `bf16` if it is not quantized."""
        self.context = context
        """Settings and state shared by all layers of the model."""
        self.masters = masters
        """Parameters that are materialized, and trained unless they have an adapter."""
        self.adapters: list[Adapter | None] = [None] * len(masters)
        """For each master, the adapter that is trained instead of it
        (`quant.model.add_lora.add_adapters`), or None.
        """
        self.low_bit: Codes | None = None
        """Codes and scales of this version; None before the first `refresh`. If the context does
        not keep codes: shapes, and the scales of the version whose codes were released.
        """
        self.version = 0
        """Number of versions made so far."""
        self.keeps_scales = False
        """If True, a version reuses the scales of the previous one (`quant.model.kept_scales`)."""
        self.offsets: dict[int, torch.Tensor] = {}
        """Index of a master → fp32 offset added to it before rounding (an unaligned learner's
        `start_from_codes`).
        """
        self._row_parallel = False
        self._kernel: Kernel | None = None
        self._plain: Kernel | None = None

    def divide_columns(self) -> None:
        """Divide the input columns among the engine's ranks (`LayerContext.ranks`)."""
        self._row_parallel = True
        self._kernel = None

    @property
    def ranks(self) -> int:
        """Number of the engine's ranks among which the input columns are divided; 1 if none."""
        return self.context.ranks if self._row_parallel else 1

    def adapt(self, index: int, adapter: Adapter) -> None:
        """Train the factors of this adapter instead of the master with this index."""
        self.adapters[index] = adapter
        self.add_module(f"adapter_{index}", adapter)

    def _materialize(self, out: Codes | None) -> Codes:
        """Return codes of the masters' present values, in the buffers of `out` if it is given."""
        raise NotImplementedError

    def keep_scales(self) -> None:
        """Reuse the present scales in later versions, if this layer's weights are quantized.

        Scales that `release_codes` has freed cannot be kept.
        """
        assert self.keeps_scales or self.low_bit is None or self.context.keeps_codes
        self.keeps_scales = self.scheme.weights is not None

    def _kept_scales(self) -> list[torch.Tensor | None]:
        """Return the scale to materialize each master with; None if its extremes determine it."""
        scales: list[torch.Tensor | None] = []
        if self.keeps_scales:
            scales += [weight.scale for weight in quantized_weights(self.low_bit)]
        # before the first version there are no scales to keep
        return scales or [None] * len(self.masters)

    def _prepare(self, low_bit: Codes) -> Kernel:
        """Return the engine's kernel over these codes."""
        raise NotImplementedError

    def _cast(self) -> Kernel:
        """Return a kernel over the masters' present values in the compute dtype."""
        raise NotImplementedError

    @torch.no_grad()
    def refresh(self) -> None:
        """Materialize the masters' present values as a new version.

        The new codes overwrite the buffers of the previous version, so anything that still points
        to those tensors sees the new version. If codes are not kept, `codes` materializes them
        instead. The next use of `kernel` prepares it.
        """
        self._kernel = None
        if self.context.keeps_codes:
            self.low_bit = self._materialize(self.low_bit)
        self.version += 1
        self.recast()  # now, because the optimizer may step the masters before the next forward

    @torch.no_grad()
    def recast(self) -> None:
        """Cast an unaligned layer's masters again, to the dtype of the present forward."""
        if not self.context.aligned:
            self._plain = None
            self._plain = self._cast()

    def codes(self) -> Codes:
        """Return codes and scales of this version.

        If codes are not kept, they are recomputed. The result has the same bits as long as the
        masters do not change, and they do not change before the next version. Collective in that
        case: all processes that share the codes must call it together.

        Raises `RuntimeError` if the layer was never materialized.
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
        """Free this version's codes, after the context was told not to keep them.

        Scales are freed as well, unless later versions have the same.
        """
        self.low_bit = self.codes().without_codes(self.keeps_scales)  # type: ignore[assignment]

    @property
    def codes_or_shapes(self) -> Codes:
        """Codes for preparing a kernel; shapes only if the engine's layers hold the codes."""
        return self.codes() if self.context.engine is None or self.low_bit is None else self.low_bit

    @property
    def kernel(self) -> Kernel:
        """The kernel that the present forward multiplies with, over this weight version.

        If the forward multiplies codes, it is the engine's layer, if that is shared, or a kernel of
        the learner's own. The latter is a second copy of the codes, built at its first use, so that
        publishing and exporting do not need the memory. If the forward multiplies no codes, it
        multiplies the masters, cast to the forward's dtype.

        Raises `KernelError` if the kernel family does not support this layer.
        """
        if not self.context.multiplies_codes:
            in_fp32 = self.context.forward is Forward.FP32
            return self._cast() if in_fp32 or self._plain is None else self._plain
        if self._kernel is not None and self.context.keeps_kernels:
            return self._kernel
        with torch.no_grad():
            kernel = self._prepare(self.codes_or_shapes)
        if self.context.keeps_kernels:
            self._kernel = kernel
        return kernel

    def release_kernel(self) -> None:
        """Free the kernel and the codes in its layout; the next forward prepares it again.

        An unaligned layer keeps its cast, because that is the weight it multiplies.
        """
        self._kernel = None

    def merged(self) -> tuple[torch.Tensor, ...]:
        """Return each master with its adapter's product added, if it has one.

        Results have the master's dtype and shape: only this process's rows of a sharded master.
        They are copied to the context's device if the masters are offloaded.
        """
        bases = [
            own_rows(master.detach()).to(device=self.context.device, non_blocking=True)
            for master in self.masters
        ]
        return tuple(
            base if adapter is None else adapter.merge(base, shard_of(master))
            for master, base, adapter in zip(self.masters, bases, self.adapters, strict=True)
        )

    def quantizer_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the values that are rounded to codes: `merged`, offset by `offsets` in fp32."""
        return tuple(
            w + self.offsets[index] if index in self.offsets else w
            for index, w in enumerate(self.merged())
        )

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """Factors A and B of every adapter, in the masters' order."""
        return tuple(
            f
            for adapter in self.adapters
            if adapter is not None
            for f in (adapter.lora_A, adapter.lora_B)
        )

    @property
    def quantizes_activations(self) -> bool:
        """True if inputs are quantized before they are multiplied."""
        return self.context.multiplies_codes and self.scheme.activations is not None

    def saved_input(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the backward saves of an input x [N, I].

        If the kernel multiplies quantized inputs, these are their codes and scales, 4 to 9 bits a
        value; otherwise the input itself.
        """
        if not self.quantizes_activations:
            return (x,)
        return multiplied_activation(x, self.scheme, self.ranks).tensors


def restored_input(
    kept: tuple[torch.Tensor, ...] | list[torch.Tensor],
) -> torch.Tensor | LowBitActivation:
    """Return the input as it was multiplied, from what `LowBitLayer.saved_input` saved."""
    return kept[0] if len(kept) == 1 else LowBitActivation(*kept)
