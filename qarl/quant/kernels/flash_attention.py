"""Attention of sequences of differing lengths in one call on CUDA: FlashAttention by vLLM's engine,
or torch's.

Both say log Σ exp of a query's scores as fp32 [H, N], which torch's backward takes.
Source: vLLM 0.32, `vllm.v1.attention.backends.flash_attn`; torch 2.13, `torch.nn.attention.varlen`.

Axes: N tokens of all sequences, S tokens they see, H heads, G heads of keys and values, D head
size.
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


def takes(q: Tensor, scoring: Scoring, sinks: Tensor | None) -> bool:
    """Whether FlashAttention multiplies such queries [N, H, D], and scores them so."""
    if (
        not q.is_cuda
        or q.dtype not in (torch.bfloat16, torch.float16)
        or q.shape[-1] > _LARGEST_HEAD
    ):
        return False
    return (scoring.plain and sinks is None) or _engine_version(
        q.shape[-1], scoring, sinks
    ) is not None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
    lengths: Sequence[int],
    seen: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Causal attention within each of several sequences that follow one another.

    q: [N, H, D], k, v: [S, G, D], in a 16-bit dtype. sinks: a score a head [H] of what no token is,
    or None. lengths: queries of each sequence, Σ = N, those of its last tokens. seen: tokens of
    each, Σ = S. By vLLM's kernel where it has one for this device. Returns [N, H, D] and the log Σ
    exp, fp32 [H, N].
    """
    version, window = (
        _engine_version(q.shape[-1], scoring, sinks),
        _sides(scoring.window),
    )
    starts, longest = _starts(tuple(lengths), q.device), max(lengths)
    starts_k, longest_k = _starts(tuple(seen), q.device), max(seen)
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
    """Of q, k and v (`operands`), each in its dtype and shape. dy, y: [N, H, D]; sums: the log Σ
    exp, fp32 [H, N].
    """
    starts, longest = _starts(tuple(lengths), y.device), max(lengths)
    starts_k, longest_k = _starts(tuple(seen), y.device), max(seen)
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
    """How many tokens before and after a query are seen; -1 is all."""
    return [-1 if window is None else window - 1, 0]


def _engine_version(head_size: int, scoring: Scoring, sinks: Tensor | None) -> int | None:
    """Of FlashAttention in vLLM's engine on this device; None where none scores so: version 2 has
    no sinks.
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
    """int32 [sequences + 1], made once for all layers of a micro-batch: a copy to the device waits
    for it.
    """
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
