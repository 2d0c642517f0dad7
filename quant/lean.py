"""Norm, rotary embedding and gated activation that keep for the backward what cannot be had again cheaply.

Forwards are the same operations in the same dtypes as plain torch's, bit for bit. Autograd would keep every
intermediate of them, many in fp32; here the inputs are kept, which their producers often keep anyway, and the rest is
computed again. Gradients are computed in fp32 and rounded once to the dtype of what they belong to.

Axes: N any leading axes, C columns, H heads, D head size.
"""

from typing import Any

import torch
from torch import nn

from quant.row_blocks import row_blocks


def _contiguous(like: torch.Tensor) -> torch.Tensor:
    """Not initialized, to be written through views."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


class RMSNorm(torch.autograd.Function):
    """x / rms(x) in fp32, rounded to the weight's dtype, times the weight. Kept: x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x: fp32 or compute dtype [N, C]; weight: compute dtype [C] → compute dtype [N, C]."""
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).to(weight.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """With n = x / rms(x): dn = dy · weight, dx = (dn - n · mean(dn · n)) / rms(x), dweight = Σ dy · n."""
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = _contiguous(x), torch.zeros_like(weight, dtype=torch.float32)
        flat = (t.flatten(0, -2) for t in (dx, grad_outputs[0], x, inverse))
        for into, dy, part, scale in row_blocks(*flat):
            normal, dnormal = part.to(torch.float32) * scale, dy.to(torch.float32)
            dweight += (dnormal * normal.to(weight.dtype)).sum(0)
            dnormal = dnormal * weight.to(torch.float32)
            mean = (dnormal * normal).mean(-1, keepdim=True)
            into.copy_(dnormal.addcmul_(normal, mean, value=-1.0).mul_(scale))
        return dx, dweight.to(weight.dtype), None


class Rotate(torch.autograd.Function):
    """Rotary embedding (half-split pairs) in fp32, rounded once. Kept: the angles. Backward: the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, H, D]; cos, sin: compute dtype [N, D] → compute dtype [N, H, D]."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """x · cos + (-x₂, x₁) · sin is linear in x: dx = dy · cos + (z₂, -z₁) with z = dy · sin."""
        dy = grad_outputs[0]
        dx = _contiguous(dy)
        angles = (t.expand(*dy.shape[:-2], -1).flatten(0, -2) for t in ctx.saved_tensors)
        for into, part, cos, sin in row_blocks(dx.flatten(0, -3), dy.flatten(0, -3), *angles):
            wide = part.to(torch.float32)
            first, second = (wide * sin.float().unsqueeze(-2)).chunk(2, dim=-1)
            into.copy_((wide * cos.float().unsqueeze(-2)).add_(torch.cat((second, -first), dim=-1)))
        return dx, None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.float().unsqueeze(-2) + turned * sin.float().unsqueeze(-2)).to(x.dtype)


class Gated(torch.autograd.Function):
    """activation(gate) · up, each rounded to the compute dtype. Kept: gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: nn.Module) -> torch.Tensor:
        """gate, up: compute dtype [N, C] → the same."""
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """By autograd through the forward, computed again."""
        gate, up = ctx.saved_tensors
        dgate, dup = _contiguous(gate), _contiguous(up)
        flat = (t.flatten(0, -2) for t in (dgate, dup, grad_outputs[0], gate, up))
        for into_gate, into_up, dy, part, other in row_blocks(*flat):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                activated = ctx.activation(leaf)
            into_up.copy_(dy * activated.detach())
            into_gate.copy_(torch.autograd.grad(activated, leaf, dy * other)[0])
        return dgate, dup, None


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)): a dense decoder's MLP, of the submodules of transformers' own."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_proj: nn.Module = mlp.get_submodule("gate_proj")
        self.up_proj: nn.Module = mlp.get_submodule("up_proj")
        self.down_proj: nn.Module = mlp.get_submodule("down_proj")
        self.act_fn: nn.Module = mlp.get_submodule("act_fn")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, C] → the same."""
        return self.down_proj(Gated.apply(self.gate_proj(x), self.up_proj(x), self.act_fn))
