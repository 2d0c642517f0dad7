"""Attention of sequences of differing lengths in one call on CUDA: FlashAttention by vLLM's engine, or torch's.

Both say log Σ exp of a query's scores as fp32 [H, N], which torch's backward takes.
Source: vLLM 0.32, `vllm.v1.attention.backends.flash_attn`; torch 2.13, `torch.nn.attention.varlen`.

Axes: N tokens of all sequences, S tokens they see, H heads, G heads of keys and values, D head size.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators

from qarl.quant.runtime.batch_invariance import batch_invariant

_LARGEST_HEAD = 256


def takes(q: torch.Tensor) -> bool:
    """Whether FlashAttention multiplies such queries [N, H, D]."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= _LARGEST_HEAD


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
    seen: Sequence[int],
    engine: bool,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each of several sequences that follow one another.

    q: [N, H, D], k, v: [S, G, D], in a 16-bit dtype. lengths: queries of each sequence, Σ = N, those of its last
    tokens. seen: tokens of each, Σ = S. engine: by vLLM's kernel where it has one for this device. window: how many
    tokens each sees, itself the last; None: all before it. Returns [N, H, D] and the log Σ exp, fp32 [H, N].
    """
    version = _engine_version(q.shape[-1]) if engine else None
    starts, longest = _starts(tuple(lengths), q.device), max(lengths)
    starts_k, longest_k = _starts(tuple(seen), q.device), max(seen)
    if version is None:
        y, sums, _ = torch.ops.torch_attn._varlen_attn(
            q, k, v, starts, starts_k, longest, longest_k, True, scale, _sides(window), True
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
        softmax_scale=scale,
        causal=True,
        window_size=_sides(window),
        return_softmax_lse=True,
        fa_version=version,
        num_splits=1 if batch_invariant() else 0,
    )


def flash_gradients(
    dy: torch.Tensor,
    operands: Sequence[torch.Tensor],
    y: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
    seen: Sequence[int],
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of q, k and v (`operands`), each in its dtype and shape. dy, y: [N, H, D]; sums: the log Σ exp, fp32 [H, N]."""
    starts, longest = _starts(tuple(lengths), y.device), max(lengths)
    starts_k, longest_k = _starts(tuple(seen), y.device), max(seen)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=y.device)
    return torch.ops.torch_attn._varlen_attn_backward(
        dy.contiguous(), *operands, y, sums, starts, starts_k, longest, longest_k, True, no_dropout, scale,
        _sides(window),
    )  # fmt: skip


def _sides(window: int | None) -> list[int]:
    """How many tokens before and after a query are seen; -1 is all."""
    return [-1 if window is None else window - 1, 0]


def _engine_version(head_size: int) -> int | None:
    """Of FlashAttention in vLLM's engine on this device; None where it has none."""
    from vllm.v1.attention.backends import fa_utils

    return fa_utils.get_flash_attn_version(head_size=head_size)


@lru_cache(maxsize=4)
def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [sequences + 1], made once for all layers of a micro-batch: a copy to the device waits for it."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
