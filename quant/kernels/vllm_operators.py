"""vLLM's own operators of a decoder on CUDA, for the learner's forward. Import only with vLLM.

Axes: N any leading axes, C columns, H heads, D head size, K experts a token, E experts.
"""

import functools
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import ir
from vllm.config import set_current_vllm_config
from vllm.model_executor.determinism.batch_invariant import rms_norm_batch_invariant
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.quant.kernels.vllm_experts import uncompiled_config
from qarl.quant.runtime.batch_invariance import batch_invariant


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, added: bool) -> torch.Tensor:
    """x: compute dtype [N, C]; weight: compute dtype [C] → compute dtype [N, C].

    added: by the kernel that adds a residual first, here to zeros: its sum of squares has an order of its own.
    """
    rows = x.reshape(-1, x.shape[-1])
    if batch_invariant() and not added:
        return rms_norm_batch_invariant(rows, weight, epsilon).view(x.shape)  # type: ignore[union-attr]
    _choose_kernels()
    if not added:
        return ir.ops.rms_norm(rows.contiguous(), weight, epsilon).view(x.shape)
    branch, residual = torch.zeros_like(rows), rows.clone()  # the kernel writes into both
    if batch_invariant():
        return rms_norm_batch_invariant(branch, weight, epsilon, residual)[0].view(x.shape)
    return ir.ops.fused_add_rms_norm.maybe_inplace(branch, residual, weight, epsilon)[0].view(x.shape)


@functools.cache
def _choose_kernels() -> None:
    """Let vLLM choose as it does for an engine without Inductor; one that runs in this process has chosen already."""
    if not ir.ops.rms_norm.get_priority():
        uncompiled_config().kernel_config.ir_op_priority.set_default()


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: compute dtype [N, H, D]; cos, sin: compute dtype [N, D], each half of D the same → compute dtype [N, H, D]."""
    heads, size = x.shape[-2:]
    turned = x.clone(memory_format=torch.contiguous_format).view(-1, heads * size)  # the kernel writes into it
    angles = [angle[..., : size // 2].expand(*x.shape[:-2], -1) for angle in (cos, sin)]
    table = torch.cat(angles, dim=-1).reshape(-1, size).to(x.dtype)
    ops.rotary_embedding(torch.arange(len(turned), device=x.device), turned, None, size, table, True)
    return turned.view(x.shape)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate, up: compute dtype [N, C] → the same."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    torch.ops._C.silu_and_mul(y, torch.cat((gate, up), dim=-1))
    return y


def top_experts(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [N, E] → weights fp32 [N, K] and experts int64 [N, K], as the engine's router has them."""
    weights, index, _ = fused_topk(logits, logits.contiguous(), top_k, renormalize)
    return weights, index.to(torch.int64)


def rotary_table(
    head_size: int, positions: int, parameters: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Cosines, then sines, of every position, dtype [positions, D]: the engine's own where one runs in this process,
    for vLLM keeps one of a kind."""
    with set_current_vllm_config(uncompiled_config()), set_default_torch_dtype(dtype), device:
        return get_rope(head_size, max_position=positions, rope_parameters=parameters).cos_sin_cache
