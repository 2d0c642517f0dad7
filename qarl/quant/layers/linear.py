"""A linear layer whose forward is the engine's low-bit product and whose backward is
straight-through.

Three products, and what is rounded in each (W the master, Ŵ and x̂ the values its and the input's
codes stand for):

    forward   y  = x̂ · Ŵᵀ     by the engine's own kernel over the published codes, so to the same
    bits: x is quantized
                              a token at a time where the scheme has low-bit activations, else x̂ is
                              x in the compute dtype; sums and scales as that kernel has them; y is
                              rounded once to the compute dtype.
    backward  dx = dy · Ŵ      Ŵ is dequantized in fp32. It is multiplied as such and only the sum
    is rounded, or, where
                              the device multiplies 16-bit values natively, Ŵ is rounded to dy's
                              dtype first.
              dW = dyᵀ · x̂     exact operands, fp32 sums, an fp32 result: masters move by less than
              a 16-bit gradient
                              resolves.

Why Ŵ and x̂, not W and x: rounding is a staircase, of slope zero wherever it has one, so its
gradient is replaced by that of the identity (straight-through). All else is the exact gradient of
what the sampler computed. With W and x it would be that of another policy, off by the rounding the
engine makes in every layer. x̂ is kept between forward and backward as its codes.

`quant.layers.straight_through` has the backward's arithmetic, block by block.
Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.kernels.reference import PlainMatmul
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.low_bit_layer import LowBitLayer, multiplied_input
from qarl.quant.layers.straight_through import add_weight_gradient, input_gradient
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize.activations import LowBitActivation
from qarl.quant.runtime.shards import shard_of, whole_shape, whole_value
from qarl.quant.schemes import Scheme


class LowBitLinear(LowBitLayer[LowBitWeight, LowBitMatmul]):
    """Replaces one `nn.Linear`.

    master: fp32, bf16 or fp16 [O, I], what the optimizer steps. bias: [O], or None. fused: the
    layers the engine multiplies together with this one (`quant.layers.stack.fuse_scales`).
    """

    def __init__(
        self,
        layer: str,
        master: nn.Parameter,
        bias: nn.Parameter | None,
        scheme: Scheme,
        context: LayerContext,
    ):
        super().__init__(layer, scheme, context, master)
        self.master = master
        self.bias = bias
        self.fused: tuple[LowBitLinear, ...] = ()
        self.low_bit_bias: torch.Tensor | None = None

    def refresh(self) -> None:
        """See `LowBitLayer.refresh`."""
        if self.bias is not None:
            self.low_bit_bias = whole_value(self.bias, self.context.dtype)
        super().refresh()

    def _materialize(self, out: LowBitWeight | None) -> LowBitWeight:
        weight, fused = (
            self.to_round()[0],
            tuple(other.to_round()[0] for other in self.fused),
        )
        (scale,), dtype, shard = (
            self._kept_scales(),
            self.context.dtype,
            shard_of(self.master),
        )
        return materialize(weight, self.scheme, dtype, self.layer, fused, out, scale, shard)

    def _prepare(self, low_bit: LowBitWeight) -> LowBitMatmul:
        return self.context.factory.linear(self.layer, [low_bit], [self.low_bit_bias])

    def _cast(self) -> LowBitMatmul:
        dtype, (merged,) = self.context.forward_dtype, self.merged()
        weight = whole_value(self.master, dtype, merged)
        return PlainMatmul(weight, None if self.bias is None else whole_value(self.bias, dtype))

    def fuse_with(self, others: "Sequence[LowBitLinear]") -> None:
        """Share one scale with these, which the engine stacks with this one."""
        self.fused = tuple(others)

    @property
    def out_features(self) -> int:
        """O."""
        return whole_shape(self.master)[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [..., I] → compute dtype [..., O]."""
        return multiply((self,), self.product, x)

    def weight_used(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight the forward multiplied with, dequantized in fp32 and rounded once to `dtype`,
        [O, I].
        """
        if self.context.multiplies_codes:
            return self.codes().dequantized(dtype)
        assert isinstance(self._plain, PlainMatmul)
        return self._plain.weight.to(dtype)


def multiply(
    parts: "Sequence[LowBitLinear]", product: LowBitMatmul, x: torch.Tensor
) -> torch.Tensor:
    """x: compute dtype [..., I] → compute dtype [..., O of all parts, one after the other], or
    wider where the engine pads its output. product: over the parts' present versions.
    """
    flat = x.reshape(-1, x.shape[-1])
    kept = parts[0].kept_input(flat.detach()) if torch.is_grad_enabled() else ()
    tensors = [t for part in parts for t in (part.master, part.bias, *part.factors)]
    y = _StraightThrough.apply(flat, parts, product, kept, *tensors)
    return y.view(*x.shape[:-1], y.shape[-1])


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        parts: "Sequence[LowBitLinear]",
        product: LowBitMatmul,
        kept: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """tensors: master, bias and factors of every part."""
        ctx.parts = parts
        ctx.save_for_backward(*kept)
        return (
            parts[0].context.rounded(product(x)).data
        )  # no view, whatever the kernel returned: some models scale it in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """The parts' rows of the gradient, one after the other; that of the input is summed over
        them.
        """
        dy, x = grad_outputs[0], multiplied_input(ctx.saved_tensors)
        need_x, needed = ctx.needs_input_grad[0], list(ctx.needs_input_grad[4:])
        weights, gradients, start = [], [], 0
        for part in ctx.parts:
            rows = dy[:, start : start + part.out_features]
            start += part.out_features
            own, needed = (
                needed[: 2 + len(part.factors)],
                needed[2 + len(part.factors) :],
            )
            gradients += _part_gradients(part, rows, x, *own[:2])
            if need_x:
                exact = part.context.gradients.fp32_input_grad
                weights.append((rows, part.weight_used(torch.float32 if exact else dy.dtype)))
        return input_gradient(weights) if need_x else None, None, None, None, *gradients


def _part_gradients(
    part: LowBitLinear,
    dy: torch.Tensor,
    x: torch.Tensor | LowBitActivation,
    need_master: bool,
    need_bias: bool,
) -> list[torch.Tensor | None]:
    """Of its master, bias and factors. dy: compute dtype [N, O]; x: [N, I] as multiplied."""
    gradients = part.context.gradients
    dw = db = None
    if need_master:
        total = gradients.into(part.master)
        if total is None:
            gradients.make_way(part.master)
        added = torch.zeros(whole_shape(part.master), device=dy.device) if total is None else total
        add_weight_gradient(added, dy, x, gradients)
        dw = gradients.delivered(part.master, added) if total is None else None
    if need_bias:
        assert part.bias is not None
        db = gradients.delivered(part.bias, gradients.unscaled(dy.sum(0, dtype=torch.float32)))
    dfactors: tuple[torch.Tensor, ...] = ()
    (adapter,) = part.adapters
    if adapter is not None:
        used = (
            x.dequantized(torch.float32) if isinstance(x, LowBitActivation) else x.to(torch.float32)
        )
        dfactors = adapter.gradients(dy.to(torch.float32), used)
    return [dw, db, *(gradients.unscaled(dfactor) for dfactor in dfactors)]
