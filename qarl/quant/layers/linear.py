"""A linear layer with the engine's low-bit product forward and a straight-through backward.

There are three products. W is the master; Ŵ and x̂ are the values for which its codes and the
input's codes stand.

Forward, y = x̂ · Ŵᵀ: The engine's own kernel multiplies the published codes, so y has the same
bits. x is quantized a token at a time if the scheme has low-bit activations; otherwise x̂ is x in
the compute dtype. Sums and scales are the kernel's; y is rounded once to the compute dtype.

Backward, dx = dy · Ŵ: Ŵ is dequantized in fp32. The product is computed in fp32 and only the sum is
rounded. If the device multiplies 16-bit values natively, Ŵ is rounded to dy's dtype first.

Backward, dW = dyᵀ · x̂: Operands are exact, sums and result are fp32. Masters move by less than a
16-bit gradient resolves.

Why Ŵ and x̂, not W and x: Rounding is a staircase, whose slope is zero wherever it exists, so its
gradient is replaced by that of the identity (straight-through). Everything else is the exact
gradient of what the sampler computed. With W and x it would be the gradient of another policy, off
by the rounding that the engine makes in every layer. x̂ is saved between forward and backward as
its codes.

`quant.layers.straight_through` has the backward's arithmetic, block by block.

Axes: N tokens, O output rows, I input columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from qarl.quant.kernels.base import LowBitMatmul
from qarl.quant.kernels.ranks import row_parallel
from qarl.quant.kernels.reference import PlainMatmul
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.low_bit_layer import LowBitLayer, restored_input
from qarl.quant.layers.straight_through import add_weight_gradient, input_gradient, input_values
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.materialize.activations import LowBitActivation
from qarl.quant.runtime.shards import shard_of, whole_value
from qarl.quant.schemes import Scheme


class LowBitLinear(LowBitLayer[LowBitWeight, LowBitMatmul]):
    """Replacement for one `nn.Linear`."""

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
        """Weight that the optimizer steps, fp32, bf16 or fp16 [O, I]."""
        self.bias = bias
        """Bias that the optimizer steps, [O], or None."""
        self.biases: tuple[nn.Parameter, ...] = () if bias is None else (bias,)
        """The bias, if there is one."""
        self.fused: tuple[LowBitLinear, ...] = ()
        """Other layers that the engine multiplies together with this one
        (`quant.layers.stack.fuse_scales`).
        """
        self.low_bit_bias: torch.Tensor | None = None
        """This version's bias, in the engine's dtype [O]; None without bias or before the first
        `refresh`.
        """

    def refresh(self) -> None:
        """Materialize a new version of weight and bias; see `LowBitLayer.refresh`."""
        if self.bias is not None:
            self.low_bit_bias = whole_value(self.bias, self.context.dtype)
        super().refresh()

    def _materialize(self, out: LowBitWeight | None) -> LowBitWeight:
        (weight,) = self.quantizer_inputs()
        fused = tuple(other.quantizer_inputs()[0] for other in self.fused)
        (scale,) = self._kept_scales()
        dtype = self.context.dtype
        shard = shard_of(self.master)
        return materialize(weight, self.scheme, dtype, self.layer, fused, out, scale, shard)

    def _prepare(self, low_bit: LowBitWeight) -> LowBitMatmul:
        biases = [self.low_bit_bias]
        return row_parallel(self.context.factory, self.ranks, self.layer, [low_bit], biases)

    def _cast(self) -> LowBitMatmul:
        dtype = self.context.forward_dtype
        (merged,) = self.merged()
        weight = whole_value(self.master, dtype, merged)
        bias = None if self.bias is None else whole_value(self.bias, dtype)
        return PlainMatmul(weight, bias)

    def fuse_with(self, others: "Sequence[LowBitLinear]") -> None:
        """Share one scale with these layers, which the engine stacks with this one."""
        self.fused = tuple(others)

    @property
    def out_features(self) -> int:
        """Number of output rows, O."""
        return self.master.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x̂ · Ŵᵀ + bias for x in the compute dtype: [..., I] → [..., O]."""
        return multiply((self,), self.kernel, x)

    def weight_used(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight that the forward multiplied, [O, I].

        It is dequantized in fp32 and rounded once to `dtype`.
        """
        if self.context.multiplies_codes:
            return self.codes().dequantized(dtype)
        assert isinstance(self._plain, PlainMatmul)
        return self._plain.weight.to(dtype)


def multiply(
    parts: "Sequence[LowBitLinear]", kernel: LowBitMatmul, x: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of all parts for one input.

    Args:
        parts: layers whose rows are stacked.
        kernel: kernel over the parts' present versions.
        x: compute dtype [..., I].

    Returns compute dtype [..., O of all parts, one after the other], or wider if the engine pads
    its output.
    """
    flat = x.reshape(-1, x.shape[-1])
    kept = parts[0].saved_input(flat.detach()) if torch.is_grad_enabled() else ()
    tensors = [t for part in parts for t in (part.master, part.bias, *part.factors)]
    y = _StraightThrough.apply(flat, parts, kernel, kept, *tensors)
    return y.view(*x.shape[:-1], y.shape[-1])


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        parts: "Sequence[LowBitLinear]",
        kernel: LowBitMatmul,
        kept: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply, and save x̂ for the backward.

        tensors: master, bias and factors of every part.
        """
        ctx.parts = parts
        ctx.save_for_backward(*kept)
        # For autograd `.data` is no view, whatever the kernel returned: some models scale y in
        # place.
        first = parts[0]
        return first.context.rounded(kernel(x), first.scheme, x.shape[-1]).data

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Return the gradients of x and of every part's tensors.

        Each part owns consecutive columns of the output gradient. The input's gradient is summed
        over the parts.
        """
        dy = grad_outputs[0]
        x = restored_input(ctx.saved_tensors)
        need_x = ctx.needs_input_grad[0]
        needed = iter(ctx.needs_input_grad[4:])
        operands = []
        gradients = []
        start = 0
        for part in ctx.parts:
            part_dy = dy[:, start : start + part.out_features]
            start += part.out_features
            need_master = next(needed)
            need_bias = next(needed)
            for _ in part.factors:
                next(needed)
            gradients += _part_gradients(part, part_dy, x, need_master, need_bias)
            if need_x:
                exact = part.context.gradients.fp32_input_grad
                dtype = torch.float32 if exact else dy.dtype
                operands.append((part_dy, part.weight_used(dtype)))
        dx = input_gradient(operands) if need_x else None
        # parts, kernel and kept input have no gradient
        return dx, None, None, None, *gradients


def _part_gradients(
    part: LowBitLinear,
    dy: torch.Tensor,
    x: torch.Tensor | LowBitActivation,
    need_master: bool,
    need_bias: bool,
) -> list[torch.Tensor | None]:
    """Return the gradients of a part's master, bias and factors.

    dy: compute dtype [N, O]. x: [N, I] as multiplied. A gradient is None if it is not needed or was
    added to its master in place.
    """
    gradients = part.context.gradients
    dw = db = None
    if need_master:
        total = gradients.accumulator(part.master)
        if total is not None:
            add_weight_gradient(total, dy, x, gradients)
        else:
            gradients.wait_for_memory(part.master)
            total = torch.zeros(part.master.shape, device=dy.device)
            add_weight_gradient(total, dy, x, gradients)
            dw = gradients.start_reduction(part.master, total)
    if need_bias:
        assert part.bias is not None
        db = gradients.start_reduction(part.bias, gradients.unscale(dy.sum(0, dtype=torch.float32)))
    dfactors: tuple[torch.Tensor, ...] = ()
    (adapter,) = part.adapters
    if adapter is not None:
        dfactors = adapter.gradients(dy.to(torch.float32), input_values(x, torch.float32))
    return [dw, db, *(gradients.unscale(dfactor) for dfactor in dfactors)]
