"""Attention of sequences of different lengths in one call on CUDA, by FlashAttention.

The kernel is that of vLLM's engine, or torch's. Both also return log Σ exp of each query's scores,
fp32 [H, N], which torch's backward reads.

Source: vLLM 0.32, `vllm.v1.attention.backends.flash_attn`; torch 2.13, `torch.nn.attention.varlen`.
Axes: N queries of all sequences, S keys of all sequences, H heads, G heads of keys and values, D
head size.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators
from torch import Tensor

from qarl.quant.kernels.base import Scoring
from qarl.quant.runtime.batch_invariance import batch_invariant

_LARGEST_HEAD = 256
"""Largest head size of FlashAttention."""


def takes(q: Tensor, scoring: Scoring, sinks: Tensor | None) -> bool:
    """Return whether FlashAttention supports queries like q [N, H, D] with this scoring."""
    head_size = q.shape[-1]
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_size > _LARGEST_HEAD:
        return False
    if scoring.plain and sinks is None:
        return True
    return _engine_version(head_size, scoring, sinks) is not None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
    lengths: Sequence[int],
    seen: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each of several sequences that follow one another.

    Uses vLLM's kernel if it has one for this device, else torch's.

    Args:
        q: queries [N, H, D], in a 16-bit dtype.
        k: keys [S, G, D].
        v: values [S, G, D].
        sinks: per head [H], the score of a sink, which is no token; or None.
        scoring: scoring of queries and keys.
        lengths: number of queries of each sequence, Σ = N; they are those of its last tokens.
        seen: number of keys of each sequence, Σ = S.

    Returns:
        The output [N, H, D], and log Σ exp of the scores, fp32 [H, N].
    """
    version = _engine_version(q.shape[-1], scoring, sinks)
    window = _sides(scoring.window)
    starts = _starts(tuple(lengths), q.device)
    longest = max(lengths)
    starts_k = _starts(tuple(seen), q.device)
    longest_k = max(seen)
    if version is None:
        y, sums, _ = torch.ops.torch_attn._varlen_attn(
            q,
            k,
            v,
            starts,
            starts_k,
            longest,
            longest_k,
            True,
            scoring.scale,
            window,
            True,
        )
        return y, sums
    from vllm.v1.attention.backends import fa_utils

    by_engine: Any = fa_utils
    return by_engine.flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        max_seqlen_q=longest,
        cu_seqlens_q=starts,
        max_seqlen_k=longest_k,
        cu_seqlens_k=starts_k,
        softmax_scale=scoring.scale,
        causal=True,
        window_size=window,
        softcap=scoring.cap,
        alibi_slopes=None if scoring.slopes is None else scoring.slopes.to(q.device),
        s_aux=sinks,
        return_softmax_lse=True,
        fa_version=version,
        num_splits=1 if batch_invariant() else 0,
    )


def flash_gradients(
    dy: Tensor,
    operands: Sequence[Tensor],
    y: Tensor,
    sums: Tensor,
    scoring: Scoring,
    lengths: Sequence[int],
    seen: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, each in its dtype and shape.

    Args:
        dy: gradient of the output, [N, H, D].
        operands: q, k and v.
        y: output, [N, H, D].
        sums: log Σ exp of the scores, fp32 [H, N].
        scoring: scoring of queries and keys.
        lengths: number of queries of each sequence.
        seen: number of keys of each sequence.
    """
    starts = _starts(tuple(lengths), y.device)
    longest = max(lengths)
    starts_k = _starts(tuple(seen), y.device)
    longest_k = max(seen)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=y.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        dy.contiguous(),
        *operands,
        y,
        sums,
        starts,
        starts_k,
        longest,
        longest_k,
        True,
        no_dropout,
        scoring.scale,
        _sides(scoring.window),
    )


def _sides(window: int | None) -> list[int]:
    """Return the numbers of tokens before and after a query that it sees; -1 for all."""
    return [-1 if window is None else window - 1, 0]


def _engine_version(head_size: int, scoring: Scoring, sinks: Tensor | None) -> int | None:
    """Return the version of FlashAttention that vLLM's engine would use on this device.

    None if no version supports the scoring; version 2, for example, has no sinks.
    """
    from vllm.v1.attention.backends import fa_utils

    version = fa_utils.get_flash_attn_version(
        requires_alibi=scoring.slopes is not None,
        head_size=head_size,
        has_sinks=sinks is not None,
        requires_softcap=scoring.cap != 0,
    )
    return None if sinks is not None and version == 2 else version


@lru_cache(maxsize=4)
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where each sequence starts in the row, and the row's length, int32 [sequences + 1].

    Cached for all layers of a micro-batch, because a copy to the device makes the host wait.
    """
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
