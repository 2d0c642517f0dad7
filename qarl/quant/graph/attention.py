"""Causal attention of whole sequences by the engine's kernel: the leaf of vLLM's `Attention`.

On CPUs the kernel gives the same bits for a token whether it is prefilled, decoded, or scored here.
On CUDA FlashAttention takes all sequences in one call; in decoding it splits keys differently. The
backward is torch's, which recomputes scores and probabilities, in fp32 on CPUs. On CUDA it is
FlashAttention's.

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
    """Attention with the engine's kernel forward.

    It saves q, k and v for the backward; on CUDA also the output and one number for each head and
    token.
    """

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
        """Return the attention's output, compute dtype [N, H, D].

        Args:
            q: compute dtype [N, H, D].
            k: compute dtype [N, G, D].
            v: compute dtype [N, G, D].
            sinks: for each head, the score of a sink that is no token, [H]; None without sinks.
            scoring: how scores are computed from products.
            sequences: which tokens see which.
        """
        ctx.scoring = scoring
        ctx.sequences = sequences
        ctx.flash = False
        # The backward's gradients are those of the rounded values: straight through the rounding.
        if scoring.fp8:
            k = fp8_values(k)
            v = fp8_values(v)
            q = fp8_values(q) if scoring.fp8_queries else q
        lengths = sequences.lengths
        seen = sequences.seen
        keys = sequences.visible(k)
        values = sequences.visible(v)
        if sequences.sees is None and flash_attention.takes(q, scoring, sinks):
            y, sums = flash_attention.flash_attention(
                q, keys, values, sinks, scoring, lengths, seen
            )
            ctx.flash = scoring.plain and sinks is None
            ctx.save_for_backward(q, k, v, sinks, *((y, sums) if ctx.flash else ()))
            return y
        ctx.save_for_backward(q, k, v, sinks)
        if q.is_cuda:
            return torch_attention(q, k, v, sinks, scoring, sequences)
        return cpu_attention(q, keys, values, scoring, lengths, seen, sinks, sequences.sees)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Differentiate by FlashAttention, or through `torch_attention` of the same values."""
        # Read them once, because a checkpointed layer does not give them a second time.
        q, k, v, sinks, *flash_results = ctx.saved_tensors
        scoring = ctx.scoring
        sequences = ctx.sequences
        if ctx.flash:
            operands = (q, sequences.visible(k), sequences.visible(v))
            y, sums = flash_results
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
        inputs = [t.detach().requires_grad_() for t in (q, k, v, sinks) if t is not None]
        q, k, v, *more = inputs
        sinks = more[0] if more else None
        with torch.enable_grad():
            y = torch_attention(q, k, v, sinks, scoring, sequences)
        dq, dk, dv, *more = torch.autograd.grad(y, inputs, grad_outputs[0])
        dsinks = more[0] if more else None
        return dq, dk, dv, dsinks, None, None


attention = _Attention.apply


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
    sequences: Sequences,
) -> Tensor:
    """Compute the same as `attention` in torch's operators.

    The result is rounded only once on CPUs, and on any device if scores are more than scaled
    products. Sequences are multiplied separately; consecutive ones of equal length share one call.
    """
    plain = scoring.plain and sinks is None
    compute = q.dtype if plain and q.device.type != "cpu" else torch.float32
    queries = q.to(compute)
    keys = sequences.visible(k.to(compute))
    values = sequences.visible(v.to(compute))
    pairs = zip(sequences.lengths, sequences.seen, strict=True)
    if sequences.sees is None:
        runs = [(length, seen, len(list(run))) for (length, seen), run in groupby(pairs)]
        last: list[Tensor | None] = [None] * len(runs)
    else:
        runs = [(length, seen, 1) for length, seen in pairs]
        last = list(sequences.sees.split(sequences.lengths))
    query_rows = [length * count for length, _, count in runs]
    key_rows = [seen * count for _, seen, count in runs]
    parts = zip(
        queries.split(query_rows),
        keys.split(key_rows),
        values.split(key_rows),
        strict=True,
    )
    outputs = []
    for (_, _, count), part, sees in zip(runs, parts, last, strict=True):
        # [count · tokens, H, D] → [count, H, tokens, D]: each sequence's own bits, in one call.
        q_, k_, v_ = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in part)
        if plain:
            y = _causal(q_, k_, v_, scoring, sees)
        else:
            y = _scored(q_, k_, v_, sinks, scoring, sees)
        outputs.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).to(q.dtype)


def _causal(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sees: Tensor | None) -> Tensor:
    """Return attention of one sequence a row, whose queries are those of its last tokens.

    sees: `Sequences.sees` of the sequence.
    """
    length = q.shape[2]
    seen = k.shape[2]
    if sees is None and length == seen and (scoring.window is None or seen <= scoring.window):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scale, enable_gqa=True
        )
    mask = _sees(length, seen, scoring.window, q.device, sees)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scoring.scale, enable_gqa=True
    )


def _scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
    sees: Tensor | None,
) -> Tensor:
    """Compute the same as `_causal` for scores that are more than scaled products."""
    length = q.shape[2]
    seen = k.shape[2]
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scoring.scale
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    if scoring.slopes is not None:
        positions = torch.arange(seen, device=q.device)
        distances = positions - positions[-length:, None]
        scores = scores + scoring.slopes.to(q)[:, None, None] * distances
    mask = _sees(length, seen, scoring.window, q.device, sees)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    # A sink takes part in the softmax as one more key, and has no value.
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    probabilities = torch.cat((scores, column), dim=-1).softmax(-1)
    return probabilities[..., :-1] @ v


def _sees(
    length: int,
    seen: int,
    window: int | None,
    device: torch.device,
    last: Tensor | None,
) -> Tensor:
    """Return the keys that each query sees, bool [length, seen].

    It sees itself and earlier keys in the window, or as many leading keys as `last` (int64
    [length]) says.
    """
    sees = torch.ones(length, seen, dtype=torch.bool, device=device)
    if last is None:
        sees = sees.tril(seen - length)
    else:
        sees &= torch.arange(seen, device=device) < last[:, None]
    return sees if window is None else sees.triu(seen - length + 1 - window)
