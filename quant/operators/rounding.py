"""Forwards of norm, rotary embedding and gate, rounded as the engine rounds them on each kind of device.

| | on CPUs | on CUDA |
|---|---|---|
| sum of residual and branch | enters the norm unrounded, in fp32 | is rounded first |
| norm, in fp32 | rounded before the weight, and after it | rounded once, after the weight |
| rotary embedding | in fp32, rounded once | the same |
| gate | rounded after the activation, and after the product | the same |

On CUDA vLLM's own operators compute them, its defaults where nothing is compiled by Inductor; torch's do the same there
without vLLM. Source: vLLM 0.32's `fused_add_rms_norm_kernel` and `rms_norm_kernel`, whose sm_90 code adds with
`HADD2.BF16`, and rounds with one `F2FP.BF16` after two fp32 products (docs/explain/cuda.md).

Axes: N any leading axes, C columns, H heads, D head size.
"""

import torch
from torch import nn
from transformers.activations import SiLUActivation

from qarl.quant.runtime.libraries import has_vllm


def rounds_as_cuda(x: torch.Tensor) -> bool:
    """Whether the engine rounds as it does on CUDA where this tensor is."""
    return x.is_cuda


def residual_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """In which the sum of residual and branch enters the norm. dtype: compute dtype."""
    return dtype if rounds_as_cuda(x) else torch.float32


def inverse_rms(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """1 / rms(x), fp32 [N, 1]. x: [N, C]."""
    return torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + epsilon)


def cuda_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, added: bool) -> torch.Tensor:
    """x / rms(x) · weight in fp32, rounded once. x, weight: compute dtype [N, C], [C] → compute dtype [N, C].

    added: x is a sum of residual and branch, which the engine makes and normalizes in one kernel.
    """
    if not (x.is_cuda and has_vllm()):
        return (x.to(torch.float32) * inverse_rms(x, epsilon) * weight.to(torch.float32)).to(weight.dtype)
    from qarl.quant.kernels.vllm_operators import rms_norm

    return rms_norm(x, weight, epsilon, added)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: compute dtype [N, H, D]; cos, sin: compute dtype [N, D], each half of D the same → compute dtype [N, H, D]."""
    if x.is_cuda and has_vllm():
        from qarl.quant.kernels.vllm_operators import rotary_embedding

        return rotary_embedding(x, cos, sin)
    fp32 = x.to(torch.float32)
    first, second = fp32.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (fp32 * cos.float().unsqueeze(-2) + turned * sin.float().unsqueeze(-2)).to(x.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: nn.Module) -> torch.Tensor:
    """activation(gate) · up, each rounded. gate, up: compute dtype [N, C] → the same."""
    if gate.is_cuda and has_vllm() and isinstance(activation, nn.SiLU | SiLUActivation):
        from qarl.quant.kernels.vllm_operators import silu_and_mul

        return silu_and_mul(gate, up)
    return activation(gate) * up
