"""Norm, rotary embedding and gated activation that keep for the backward what cannot be had again cheaply.

Forwards are the engine's (`quant.operators.rounding`). Autograd would keep every intermediate of plain torch's, many in
fp32; here the inputs are kept, which their producers often keep anyway, and the rest is
computed again. Gradients are computed in fp32 and rounded once to the dtype of what they belong to; how, the
`Gradients` of the model know.

Axes: N any leading axes, C columns, H heads, D head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation

from qarl.quant.layers.gradients import Gradients
from qarl.quant.layers.stack import LinearStack
from qarl.quant.operators import rounding


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    """Not initialized, to be written through views."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


class RMSNorm(torch.autograd.Function):
    """x / rms(x) · weight, in fp32 up to the first rounding. Kept: x and, on CPUs, 1 / rms(x)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, gradients: Gradients, added: bool = False
    ) -> torch.Tensor:
        """x: fp32 or compute dtype [N, C]; weight: any dtype [C] → that dtype [N, C]. added: see
        `rounding.cuda_norm`."""
        ctx.gradients, ctx.epsilon = gradients, epsilon
        if weight.dtype == x.dtype and rounding.rounds_as_cuda(x):  # the engine's kernels take no other (Gemma's)
            ctx.save_for_backward(x, weight)
            return rounding.cuda_norm(x, weight, epsilon, added)
        fp32 = x.to(torch.float32)
        inverse = rounding.inverse_rms(fp32, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (fp32 * inverse).to(weight.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """See `_norm_gradients`."""
        x, weight, *kept = ctx.saved_tensors
        inverse = kept[0] if kept else rounding.inverse_rms(x, ctx.epsilon)
        dx = _contiguous(x)
        rows = [t.flatten(0, -2) for t in (dx, grad_outputs[0], x, inverse)]
        dweight = sum(ctx.gradients.over_rows(_norm_gradients, rows, weight), start=torch.zeros((), device=x.device))
        return dx, dweight.to(weight.dtype), None, None, None


def _norm_gradients(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """With n = x · inverse: dn = dy · weight, dx = (dn - n · mean(dn · n)) · inverse. Returns dweight = Σ dy · n, fp32
    [C]."""
    normal, dnormal = x.to(torch.float32) * inverse, dy.to(torch.float32)
    dweight = (dnormal * normal.to(weight.dtype)).sum(0)
    dnormal = dnormal * weight.to(torch.float32)
    mean = (dnormal * normal).mean(-1, keepdim=True)
    dx.copy_(dnormal.addcmul_(normal, mean, value=-1.0).mul_(inverse))
    return dweight


class Rotate(torch.autograd.Function):
    """Rotary embedding (half-split pairs) in fp32, rounded once. Kept: the angles. Backward: the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, gradients: Gradients) -> torch.Tensor:
        """x: compute dtype [N, H, D]; cos, sin: compute dtype [N, D] → compute dtype [N, H, D]."""
        ctx.save_for_backward(cos, sin)
        ctx.gradients = gradients
        return rounding.rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """See `_rotate_back`."""
        dy = grad_outputs[0]
        dx = _contiguous(dy)
        angles = [t.expand(*dy.shape[:-2], -1).flatten(0, -2) for t in ctx.saved_tensors]
        ctx.gradients.over_rows(_rotate_back, (dx.flatten(0, -3), dy.flatten(0, -3), *angles))
        return dx, None, None, None


def _rotate_back(dx: torch.Tensor, dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """x · cos + (-x₂, x₁) · sin is linear in x: dx = dy · cos + (z₂, -z₁) with z = dy · sin."""
    fp32 = dy.to(torch.float32)
    first, second = (fp32 * sin.float().unsqueeze(-2)).chunk(2, dim=-1)
    dx.copy_((fp32 * cos.float().unsqueeze(-2)).add_(torch.cat((second, -first), dim=-1)))


class Gated(torch.autograd.Function):
    """activation(gate) · up, each rounded to the compute dtype. Kept: gate and up."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: nn.Module, gradients: Gradients
    ) -> torch.Tensor:
        """gate, up: compute dtype [N, C] → the same."""
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.gradients = activation, gradients
        return rounding.gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """See `_gate_gradients`."""
        gate, up = ctx.saved_tensors
        dgate, dup = _contiguous(gate), _contiguous(up)
        rows = [t.flatten(0, -2) for t in (dgate, dup, grad_outputs[0], gate, up)]
        ctx.gradients.over_rows(_gate_gradients, rows, ctx.activation)
        return dgate, dup, None, None


def _gate_gradients(
    dgate: torch.Tensor,
    dup: torch.Tensor,
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """By autograd through the activation, computed again; SiLU's derivative by the operator autograd would call."""
    if isinstance(activation, nn.SiLU | SiLUActivation):
        dup.copy_(dy * activation(gate))
        dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
        return
    activated, back, *_ = torch.func.vjp(activation, gate)
    dup.copy_(dy * activated)
    dgate.copy_(back(dy * up)[0])


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)): a dense decoder's MLP, of the submodules of transformers' own. gate_up:
    multiplies gate and up as one, where they are low-bit layers."""

    def __init__(self, mlp: nn.Module, gradients: Gradients):
        super().__init__()
        self.gate_proj: nn.Module = mlp.get_submodule("gate_proj")
        self.up_proj: nn.Module = mlp.get_submodule("up_proj")
        self.down_proj: nn.Module = mlp.get_submodule("down_proj")
        self.act_fn: nn.Module = mlp.get_submodule("act_fn")
        self.gate_up: LinearStack | None = None
        self._gradients = gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, C] → the same."""
        gate, up = self.gate_up(x) if self.gate_up else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(Gated.apply(gate, up, self.act_fn, self._gradients))
