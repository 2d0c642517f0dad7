"""Causal attention of whole sequences: by the engine's kernel where the learner can call it, else by torch's.

On CPUs the engine's kernel gives the same bits for a token whether it is prefilled, decoded, or scored here. Its
backward is torch's, which computes scores and probabilities again in fp32. On CUDA FlashAttention takes all sequences
in one call, by the engine's kernel too, with torch's FlashAttention as backward; decoding splits keys otherwise there.

Axes: B sequences, T tokens, N tokens of all sequences, S tokens they see, H heads, G heads of keys and values, D head
size.
"""

from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from qarl.quant.kernels import flash_attention
from qarl.quant.operators.packing import Sequences
from qarl.quant.runtime.libraries import has_vllm


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sequences: Sequences | None = None,
    kernel: str = "reference",
    window: int | None = None,
) -> torch.Tensor:
    """q: [B, T, H, D], k, v: [B, T, G, D] in the compute dtype → [B, T, H, D], rounded once on CPUs.

    sequences: that one row (B = 1) holds; None where every row is one sequence. kernel: the family the learner
    multiplies with, one of `quant.kernels.KERNELS`. window: how many tokens each sees, itself the last; None: all
    before it.
    """
    shape, sequences = q.shape, sequences or Sequences.apart([q.shape[1]] * q.shape[0])
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    if flash_attention.takes(q):
        y = _FlashAttention.apply(q, k, v, scale, sequences, window, _multiplies_by_vllm(kernel))
    elif uses_cpu_kernel(kernel, q.device.type, q.shape[-1]):
        y = _EngineAttention.apply(q, k, v, scale, sequences, window)
    else:
        y = torch_attention(q, k, v, scale, sequences, window)
    return y.view(shape)


def _multiplies_by_vllm(kernel: str) -> bool:
    return kernel in ("auto", "vllm") and has_vllm()


@cache
def uses_cpu_kernel(kernel: str, device: str, head_size: int) -> bool:
    """Whether the forward's attention is the engine's kernel for CPUs: with vLLM's products, for head sizes it has."""
    if not _multiplies_by_vllm(kernel) or device != "cpu":
        return False
    from qarl.quant.kernels.cpu_attention import takes_heads_of

    return takes_heads_of(head_size)


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sequences: Sequences, window: int | None = None
) -> torch.Tensor:
    """q: [N, H, D], k, v: [N, G, D] in the compute dtype → [N, H, D], rounded once on CPUs. window: see `attention`.

    Every sequence is multiplied alone, those of one length in a row in one call.
    """
    compute = torch.float32 if q.device.type == "cpu" else q.dtype
    queries, keys, values = q.to(compute), *(sequences.visible(t.to(compute)) for t in (k, v))
    shapes = [(*shape, len(list(run))) for shape, run in groupby(zip(sequences.lengths, sequences.seen, strict=True))]
    of_queries, of_keys = ([shape[n] * shape[2] for shape in shapes] for n in (0, 1))
    parts = zip(queries.split(of_queries), keys.split(of_keys), values.split(of_keys), strict=True)
    done = []
    for (_, _, count), run in zip(shapes, parts, strict=True):
        # [count · tokens, H, D] → [count, H, tokens, D]: each sequence's own bits, in one call.
        q_, k_, v_ = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in run)
        y = _causal(q_, k_, v_, scale, window)
        done.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(done).to(q.dtype)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """One sequence a row; its queries are those of its last tokens."""
    length, seen = q.shape[2], k.shape[2]
    if length == seen and (window is None or seen <= window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    sees = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
    if window is not None:
        sees = sees.triu(seen - length + 1 - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=True)


class _FlashAttention(torch.autograd.Function):
    """Kept: q, k, v, the output, and a number a head and token."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sequences: Sequences,
        window: int | None,
        engine: bool,
    ) -> torch.Tensor:
        """q: [N, H, D], k, v: [N, G, D] → [N, H, D]."""
        seen = sequences.visible(k), sequences.visible(v)
        lengths = sequences.lengths, sequences.seen
        y, sums = flash_attention.flash_attention(q, *seen, scale, *lengths, engine, window)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.scale, ctx.sequences, ctx.window = scale, sequences, window
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """By torch's FlashAttention."""
        q, k, v, y, sums = ctx.saved_tensors
        sequences: Sequences = ctx.sequences
        operands = q, sequences.visible(k), sequences.visible(v)
        lengths = sequences.lengths, sequences.seen
        dq, dk, dv = flash_attention.flash_gradients(
            grad_outputs[0], operands, y, sums, ctx.scale, *lengths, ctx.window
        )
        return dq, sequences.summed(dk), sequences.summed(dv), None, None, None, None


class _EngineAttention(torch.autograd.Function):
    """Kept: q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sequences: Sequences,
        window: int | None,
    ) -> torch.Tensor:
        """q: [N, H, D], k, v: [N, G, D] → [N, H, D]."""
        from qarl.quant.kernels.cpu_attention import cpu_attention

        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.sequences, ctx.window = scale, sequences, window
        seen = sequences.visible(k), sequences.visible(v)
        return cpu_attention(q, *seen, scale, sequences.lengths, sequences.seen, window)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        """Through `torch_attention` of the same values."""
        q, k, v = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch_attention(q, k, v, ctx.scale, ctx.sequences, ctx.window)
        return *torch.autograd.grad(y, (q, k, v), grad_outputs[0]), None, None, None
