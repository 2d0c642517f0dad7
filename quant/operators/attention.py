"""Causal attention of whole sequences: by the engine's kernel where the learner can call it, else by torch's.

On CPUs the engine's kernel gives the same bits for a token whether it is prefilled, decoded, or scored here. Its
backward is torch's, which computes scores and probabilities again in fp32. On CUDA FlashAttention takes all sequences
in one call, by the engine's kernel too, with torch's FlashAttention as backward; decoding splits keys otherwise there.

Axes: B sequences, T tokens, N tokens of all sequences, H heads, G heads of keys and values, D head size.
"""

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from quant.kernels import flash_attention
from quant.runtime.libraries import has_vllm


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    lengths: Sequence[int] | None = None,
    kernel: str = "torch",
    window: int | None = None,
) -> torch.Tensor:
    """q: [B, T, H, D], k, v: [B, T, G, D] in the compute dtype → [B, T, H, D], rounded once on CPUs.

    lengths: of the sequences that one row (B = 1) holds; None where every row is one sequence. kernel: the family the
    learner multiplies with, one of `quant.kernels.KERNELS`. window: how many tokens each sees, itself the last; None:
    all before it.
    """
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    sequences = [q.shape[1]] * q.shape[0] if lengths is None else list(lengths)
    if flash_attention.takes(packed[0]):
        return _FlashAttention.apply(*packed, scale, sequences, window, _multiplies_by_vllm(kernel)).view(q.shape)
    if uses_cpu_kernel(kernel, q.device.type, q.shape[-1]):
        return _EngineAttention.apply(*packed, scale, sequences, window).view(q.shape)
    y = torch_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, lengths, window)
    return y.transpose(1, 2)


def _multiplies_by_vllm(kernel: str) -> bool:
    return kernel in ("auto", "vllm") and has_vllm()


@cache
def uses_cpu_kernel(kernel: str, device: str, head_size: int) -> bool:
    """Whether the forward's attention is the engine's kernel for CPUs: with vLLM's products, for head sizes it has."""
    if not _multiplies_by_vllm(kernel) or device != "cpu":
        return False
    from quant.kernels.cpu_attention import takes_heads_of

    return takes_heads_of(head_size)


def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    lengths: Sequence[int] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """q: [B, H, T, D], k, v: [B, H/g, T, D] in the compute dtype → [B, H, T, D], rounded once on CPUs.

    lengths, window: see `attention`; every sequence is then multiplied alone, those of one length in a row in one call.
    """
    compute = torch.float32 if q.device.type == "cpu" else q.dtype
    wide = [t.to(compute) for t in (q, k, v)]
    if lengths is None:
        q_, k_, v_ = wide
        return _causal(q_, k_, v_, scale, window).to(q.dtype)
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    parts = zip(*(t.split([length * count for length, count in runs], dim=2) for t in wide), strict=True)
    done = []
    for (length, count), run in zip(runs, parts, strict=True):
        # [1, H, count · length, D] → [count, H, length, D]: each sequence's own bits, in one call.
        queries, keys, values = (t[0].unflatten(1, (count, length)).transpose(0, 1) for t in run)
        y = _causal(queries, keys, values, scale, window)
        done.append(y.transpose(0, 1).flatten(1, 2)[None])
    return torch.cat(done, dim=2).to(q.dtype)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """One sequence a row."""
    length = q.shape[2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


class _FlashAttention(torch.autograd.Function):
    """Kept: q, k, v, the output, and a number a head and token."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        lengths: list[int],
        window: int | None,
        engine: bool,
    ) -> torch.Tensor:
        """q: [N, H, D], k, v: [N, G, D] → [N, H, D]."""
        y, sums = flash_attention.flash_attention(q, k, v, scale, lengths, engine, window)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.scale, ctx.lengths, ctx.window = scale, lengths, window
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """By torch's FlashAttention."""
        q, k, v, y, sums = ctx.saved_tensors
        gradients = flash_attention.flash_gradients(
            grad_outputs[0], (q, k, v), y, sums, ctx.scale, ctx.lengths, ctx.window
        )
        return *gradients, None, None, None, None


class _EngineAttention(torch.autograd.Function):
    """Kept: q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        lengths: list[int],
        window: int | None,
    ) -> torch.Tensor:
        """q: [N, H, D], k, v: [N, G, D] → [N, H, D]."""
        from quant.kernels.cpu_attention import cpu_attention

        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.lengths, ctx.window = scale, lengths, window
        return cpu_attention(q, k, v, scale, lengths, window)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Through `torch_attention` of the same values."""
        q, k, v = (t.detach()[None].transpose(1, 2).requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch_attention(q, k, v, ctx.scale, ctx.lengths, ctx.window)
        gradients = torch.autograd.grad(y, (q, k, v), grad_outputs[0][None].transpose(1, 2))
        return *(gradient.transpose(1, 2)[0] for gradient in gradients), None, None, None
