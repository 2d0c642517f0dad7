"""A linear layer whose forward is the engine's low-bit product and whose backward is straight-through.

Forward:  y = kernel(x, codes(W)), the codes being those that are published.
Backward: gradients through the dequantized weight and activation actually used,
          dx = dy · Ŵ,  dW = dyᵀ · x̂,  the rounding itself counted as identity (`quant.layers.straight_through`: in
          what precision).

Axes: N tokens, O output rows, I input columns.
"""

from typing import Any

import torch
from torch import nn

from quant.checkpoint.families import FUSED_IN_ENGINE
from quant.kernels.base import Product, ProductFactory
from quant.layers.gradients import Gradients
from quant.layers.lora import Adapter
from quant.layers.straight_through import add_weight_gradient, input_gradient
from quant.materialize import LowBitWeight, materialize
from quant.materialize.activations import LowBitActivation, quantize_activation
from quant.schemes import Scheme


class LowBitLinear(nn.Module):
    """Replaces one `nn.Linear`.

    master: fp32, bf16 or fp16 [O, I], what the optimizer steps. scheme: of this layer, `bf16` where it is left alone.
    aligned: multiply the low-bit codes (True), or the master cast to the compute dtype (False, the plain
    quantized-rollout baseline; the low-bit tensors are still materialized for publishing).
    compute_dtype: what an unaligned forward computes in, set by the model where it is not `dtype`, the engine's.
    fused: the layers the engine multiplies together with this one; see `fuse_scales`.
    adapter: None, or what is trained instead of the master (`quant.model.add_lora.add_adapters`).
    gradients: the model's (`quant.layers.gradients`).
    """

    def __init__(
        self,
        layer: str,
        master: nn.Parameter,
        bias: nn.Parameter | None,
        scheme: Scheme,
        factory: ProductFactory,
        dtype: torch.dtype,
        aligned: bool = True,
    ):
        super().__init__()
        self.layer = layer
        self.master = master
        self.bias = bias
        self.scheme = scheme
        self.dtype = dtype
        self.compute_dtype = dtype
        self.aligned = aligned
        self.gradients = Gradients()
        self._factory = factory
        self.fused: tuple[LowBitLinear, ...] = ()
        self.adapter: Adapter | None = None
        self.low_bit: LowBitWeight | None = None
        self.low_bit_bias: torch.Tensor | None = None
        self._product: Product | None = None

    def refresh(self) -> None:
        """Materialize the masters' present values, into the buffers of the version before: whatever still points to
        those tensors then sees the new version. The kernel is prepared by the next use of `product`."""
        self._product = None
        fused = tuple(other.merged() for other in self.fused)
        self.low_bit = materialize(self.merged(), self.scheme, self.dtype, self.layer, fused, self.low_bit)
        if self.bias is not None:
            self.low_bit_bias = self.bias.detach().to(self.dtype, copy=True)
        if not self.aligned:  # now, for the master may have moved on by the next forward
            bias = None if self.bias is None else self.bias.detach().to(self.compute_dtype, copy=True)
            self._product = PlainProduct(self.merged().to(self.compute_dtype, copy=True), bias)

    def merged(self) -> torch.Tensor:
        """What is materialized: the master, with the adapter's product added where there is one; master's dtype
        [O, I]."""
        master = self.master.detach()
        return master if self.adapter is None else self.adapter.merge(master)

    @property
    def product(self) -> Product:
        """This weight version in the kernel's own layout: a second copy of it, built at first use, so that publishing
        and exporting alone do without. Raises `KernelError` where the kernel family has none."""
        if self.low_bit is None:
            raise RuntimeError(f"layer {self.layer!r} was never materialized: call LowBitModel.refresh() first")
        if self._product is None:
            with torch.no_grad():
                self._product = self._factory(self.layer, self.low_bit, self.low_bit_bias)
        return self._product

    def release_product(self) -> None:
        """Give the kernel's copy back; the next forward builds it again. That of an unaligned layer is
        its weight, and stays."""
        if self.aligned:
            self._product = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [..., I] → compute dtype [..., O]."""
        flat = x.reshape(-1, x.shape[-1])
        factors = () if self.adapter is None else (self.adapter.lora_A, self.adapter.lora_B)
        y = _StraightThrough.apply(flat, self.master, self.bias, self, *factors)
        return y.view(*x.shape[:-1], -1)

    def weight_used(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight the forward multiplied with, dequantized in fp32 and rounded once to `dtype`, [O, I]."""
        assert self.low_bit is not None
        if self.aligned:
            return self.low_bit.dequantized(dtype)
        return self.merged().to(self.compute_dtype).to(dtype)

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of what the forward is given and returns."""
        return self.dtype if self.aligned else self.compute_dtype


def fuse_scales(linears: dict[str, LowBitLinear]) -> None:
    """Tell layers that the engine stacks, and whose tensor-wide scale must agree then (`Scheme.fuses_scales`), of each
    other.

    linears: all of a model's, by name. Without this the engine would multiply k and v with the scale of q.
    """
    for name, linear in linears.items():
        if linear.scheme.fuses_scales:
            parent, dot, leaf = name.rpartition(".")
            partners = next((parts for parts in FUSED_IN_ENGINE.values() if leaf in parts), ())
            others = [linears.get(parent + dot + partner) for partner in partners if partner != leaf]
            linear.fused = tuple(other for other in others if other is not None)


class PlainProduct:
    """The master cast to the compute dtype: an unaligned learner. weight: compute dtype [O, I]."""

    name = "plain"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        return nn.functional.linear(x, self._weight, self._bias)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        master: torch.Tensor,
        bias: torch.Tensor | None,
        linear: LowBitLinear,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.linear = linear
        if linear.aligned and linear.scheme.activations is not None:
            low_bit = quantize_activation(x, linear.scheme)
            ctx.save_for_backward(low_bit.codes, low_bit.scale, low_bit.zero_point)
        else:
            ctx.save_for_backward(x)
        return linear.product(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        linear: LowBitLinear = ctx.linear
        gradients, dy, saved = linear.gradients, grad_outputs[0], ctx.saved_tensors
        need_x, need_master, need_bias, *_ = ctx.needs_input_grad
        dx = None
        if need_x:
            dx = input_gradient(dy, linear.weight_used(torch.float32 if gradients.exact_inputs else dy.dtype))
        x = saved[0] if len(saved) == 1 else LowBitActivation(*saved)
        dw = gradients.into(linear.master) if need_master else None
        added = dw is not None
        if need_master:
            assert linear.low_bit is not None
            dw = torch.zeros(linear.low_bit.shape, dtype=torch.float32, device=dy.device) if dw is None else dw
            add_weight_gradient(dw, dy, x, gradients)
        db = gradients.unscaled(dy.sum(0, dtype=torch.float32)) if need_bias else None
        dfactors = ()
        if linear.adapter is not None:
            used = x.dequantized(torch.float32) if isinstance(x, LowBitActivation) else x.to(torch.float32)
            dfactors = linear.adapter.gradients(dy.to(torch.float32), used)
        return dx, None if added else dw, db, None, *(gradients.unscaled(dfactor) for dfactor in dfactors)
