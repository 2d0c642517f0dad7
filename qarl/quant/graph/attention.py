"""Causal attention of whole sequences, by the engine's kernel: the leaf of vLLM's `Attention`.

On CPUs the kernel gives the same bits for a token whether it is prefilled, decoded, or scored here.
On CUDA FlashAttention takes all sequences in one call; decoding splits keys otherwise there. The
backward is torch's, which computes scores and probabilities again, in fp32 on CPUs;
FlashAttention's on CUDA.

Axes: N tokens of all sequences, S tokens they see, H heads, G heads of keys and values, D head
size.
"""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.quant.graph.packing import Sequences
from qarl.quant.kernels import flash_attention
from qarl.quant.kernels.base import Scoring
from qarl.quant.kernels.cpu_attention import cpu_attention
from qarl.quant.materialize.fp8 import fp8_values


class _Attention(torch.autograd.Function):
    """Kept: q, k and v; on CUDA the output, and a number a head and token."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scoring: Scoring,
        sequences: Sequences,
    ) -> Tensor:
        """q: [N, H, D], k, v: [N, G, D] in the compute dtype → [N, H, D]. sinks: a score a head [H]
        of what no token is, or None.
        """
        ctx.scoring, ctx.sequences, ctx.flash = scoring, sequences, False
        # the gradients below are of these values: straight through the rounding
        if scoring.fp8:
            k, v = fp8_values(k), fp8_values(v)
            q = fp8_values(q) if scoring.fp8_queries else q
        lengths, seen = sequences.lengths, sequences.seen
        keys, values = sequences.visible(k), sequences.visible(v)
        if flash_attention.takes(q, scoring, sinks):
            y, sums = flash_attention.flash_attention(
                q, keys, values, sinks, scoring, lengths, seen
            )
            ctx.flash = scoring.plain and sinks is None
            ctx.save_for_backward(q, k, v, sinks, *((y, sums) if ctx.flash else ()))
            return y
        ctx.save_for_backward(q, k, v, sinks)
        if q.is_cuda:
            return torch_attention(q, k, v, sinks, scoring, sequences)
        return cpu_attention(q, keys, values, scoring, lengths, seen, sinks)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """By FlashAttention, or through `torch_attention` of the same values."""
        # once: a checkpointed layer gives them no second time
        q, k, v, sinks, *of_flash = ctx.saved_tensors
        scoring, sequences = ctx.scoring, ctx.sequences
        if ctx.flash:
            operands = q, sequences.visible(k), sequences.visible(v)
            y, sums = of_flash
            dq, dk, dv = flash_attention.flash_gradients(
                grad_outputs[0],
                operands,
                y,
                sums,
                scoring,
                sequences.lengths,
                sequences.seen,
            )
            return dq, sequences.summed(dk), sequences.summed(dv), None, None, None
        q, k, v, *of_sinks = inputs = [
            t.detach().requires_grad_() for t in (q, k, v, sinks) if t is not None
        ]
        with torch.enable_grad():
            y = torch_attention(q, k, v, of_sinks[0] if of_sinks else None, scoring, sequences)
        gradients = torch.autograd.grad(y, inputs, grad_outputs[0])
        return *gradients[:3], gradients[3] if sinks is not None else None, None, None


attention = _Attention.apply


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
    sequences: Sequences,
) -> Tensor:
    """As `attention`, in torch's operators, rounded once on CPUs, and where scores are more than
    scaled products. Every sequence is multiplied alone, those of one length in a row in one call.
    """
    plain = scoring.plain and sinks is None
    compute = q.dtype if plain and q.device.type != "cpu" else torch.float32
    queries, keys, values = (
        q.to(compute),
        *(sequences.visible(t.to(compute)) for t in (k, v)),
    )
    shapes = [
        (*shape, len(list(run)))
        for shape, run in groupby(zip(sequences.lengths, sequences.seen, strict=True))
    ]
    of_queries, of_keys = ([shape[n] * shape[2] for shape in shapes] for n in (0, 1))
    parts = zip(
        queries.split(of_queries),
        keys.split(of_keys),
        values.split(of_keys),
        strict=True,
    )
    done = []
    for (_, _, count), run in zip(shapes, parts, strict=True):
        # [count · tokens, H, D] → [count, H, tokens, D]: each sequence's own bits, in one call.
        q_, k_, v_ = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in run)
        y = _causal(q_, k_, v_, scoring) if plain else _scored(q_, k_, v_, sinks, scoring)
        done.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(done).to(q.dtype)


def _causal(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """One sequence a row; its queries are those of its last tokens."""
    length, seen = q.shape[2], k.shape[2]
    if length == seen and (scoring.window is None or seen <= scoring.window):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=True
        )
    mask = _sees(length, seen, scoring.window, q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scoring.scale, enable_gqa=True
    )


def _scored(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scoring: Scoring) -> Tensor:
    """As `_causal`, with scores that are more than scaled products."""
    length, seen, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scoring.scale
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    if scoring.slopes is not None:
        places = torch.arange(seen, device=q.device)
        scores = scores + scoring.slopes.to(q)[:, None, None] * (places - places[-length:, None])
    scores = scores.masked_fill(~_sees(length, seen, scoring.window, q.device), float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1] @ v


def _sees(length: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, seen]."""
    sees = torch.ones(length, seen, dtype=torch.bool, device=device).tril(seen - length)
    return sees if window is None else sees.triu(seen - length + 1 - window)
