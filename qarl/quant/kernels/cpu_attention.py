"""Attention by the kernel vLLM's engine runs on CPUs, over whole sequences: the same bits in
prefill and in decoding.

The kernel reads keys and values from a paged cache, so a call fills one of its own, which lives as
long as the call.

It goes through the keys tile by tile under a running maximum, so the tiles decide a token's last
bits. A tile's width depends on how many queries are computed together, and those on the number of
threads and on the other sequences: a token that is decoded alone has tiles of some 16,000 keys, one
that is prefilled among 600 others tiles of 640 (head size 64) or 320 (head size 128). Therefore
engine and learner both cut every sequence's queries into requests so short that the kernel takes
its widest tile for all of them (`short_requests`). Tiles are then those of a token decoded alone.

Source: vLLM 0.32, `vllm.v1.attention.backends.cpu_attn` and `csrc/cpu/cpu_attn_impl.hpp`.

Axes: N tokens of all sequences, S tokens they see, H heads, G heads of keys and values, D head
size, R requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from qarl.configs.errors import ModelError
from qarl.quant.kernels.base import Scoring

_BLOCK = 32
"""Tokens of a page: the least the kernel takes. Its size changes no bit
(tests/quant/test_attention.py).
"""
_ROWS_OF_ISA = {"vec": 8, "vec16": 16}
"""Rows (queries times the heads that share a key head) that a kernel multiplies at once, by the
kernel's name: `MaxQHeadNumPerIteration` in vLLM's sources. A request of no more rows than that gets
the widest tile.
"""
_WIDEST_WINDOW = 2048
"""Tokens of the longest sliding window that always fits one tile: with 256 KiB of level-2 cache a
tile has some 3,800 keys. Where a window reaches over several tiles, the first one begins where the
window of the request's first query does.
"""


@dataclass(frozen=True)
class Requests:
    """What the kernel is told of the queries in a row of N tokens.

    start: int32 [R + 1], where each request's queries begin, and N. seen: int32 [R], keys that a
    request's last query sees. sequence: int64 [R], which sequence a request is part of.
    """

    start: torch.Tensor
    seen: torch.Tensor
    sequence: torch.Tensor


def queries_per_request(isa: str, heads_per_key_head: int, window: int | None) -> int:
    """Return the most queries that one request may have for its keys to lie in the widest tiles.

    isa: the kernel's name (`cpu_isa`). heads_per_key_head: H / G. window: of sliding-window
    attention in tokens, or None. Kernels that are not known here get one query a request, which has
    the widest tile whatever the kernel.
    """
    rows = _ROWS_OF_ISA.get(isa)
    if rows is None or (window is not None and window > _WIDEST_WINDOW):
        return 1
    # The kernel shares a key head's tile among its heads only where they fill its rows evenly.
    return rows // heads_per_key_head if rows % heads_per_key_head == 0 else rows


def short_requests(start: torch.Tensor, seen: torch.Tensor, queries: int) -> Requests:
    """Cut each sequence's queries into requests of at most `queries`.

    start: integer [B + 1], where the queries of B sequences begin in the row, and N. seen: integer
    [B], keys that each sequence's last query sees.
    """
    lengths = start.diff().long()
    parts = (lengths + queries - 1) // queries
    sequence = torch.arange(len(lengths)).repeat_interleave(parts)
    number = torch.arange(len(sequence)) - (parts.cumsum(0) - parts)[sequence]
    end = torch.minimum((number + 1) * queries, lengths[sequence])
    counts = end - number * queries
    return Requests(
        start=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32),
        seen=(seen.long()[sequence] - lengths[sequence] + end).to(torch.int32),
        sequence=sequence,
    )


def cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    lengths: Sequence[int],
    seen: Sequence[int],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each of several sequences that follow one another.

    q: [N, H, D], k, v: [S, G, D], in a compute dtype. lengths: queries of each sequence, Σ = N,
    those of its last tokens. seen: tokens of each, Σ = S. sinks: a score a head [H] of what no
    token is, or None. Returns [N, H, D] in that dtype, rounded once.
    """
    from vllm import _custom_ops as ops

    length = torch.tensor(seen, dtype=torch.int32)
    isa = cpu_isa(q.dtype, q.shape[2])
    queries = queries_per_request(isa, q.shape[1] // k.shape[1], scoring.window)
    requests = short_requests(torch.tensor([0, *lengths]).cumsum(0), length, queries)
    pages = (length + _BLOCK - 1) // _BLOCK
    first = (pages.cumsum(0) - pages).to(torch.int32)
    # From where a sequence's tokens are in k and v to its slots: its first page's less what came
    # before it.
    slots = torch.arange(len(k)) + (first * _BLOCK - (length.cumsum(0) - length)).repeat_interleave(
        length
    )
    # Zeros: what lies behind a sequence's end is multiplied by probabilities of zero, which no NaN
    # may meet.
    stored, kind = (torch.uint8, "fp8") if scoring.fp8 else (k.dtype, "auto")
    cache = torch.zeros(int(pages.sum()), k.shape[1], 2 * _BLOCK, k.shape[2], dtype=stored)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        k.contiguous(), v.contiguous(), keys, values, slots, isa, kv_cache_dtype=kind
    )
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(requests.seen),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        seq_lens=requests.seen,
        dtype=q.dtype,
        query_start_loc=requests.start,
        causal=True,
        sliding_window_size=scoring.window or -1,
        isa=isa,
        # as in the engine: see `quant.kernels.vllm_cpu.attention`
        enable_kv_split=False,
    )
    table = first[:, None] + torch.arange(int(pages.max()), dtype=torch.int32)
    output = torch.empty(q.shape, dtype=q.dtype)
    ops.cpu_attention_with_kv_cache(
        query=q.contiguous(),
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=requests.start,
        seq_lens=requests.seen,
        scale=scoring.scale,
        causal=True,
        alibi_slopes=scoring.slopes,
        sliding_window=scoring.window or -1,
        block_table=table[requests.sequence],
        softcap=scoring.cap,
        scheduler_metadata=plan,
        s_aux=sinks,
        kv_cache_dtype=kind,
    )
    return output


def require_head_size(model: str, config: PretrainedConfig) -> None:
    """Raise `ModelError` for heads of a size that vLLM's attention lacks on CPUs, so that no engine
    could sample.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text, heads = (
        config.get_text_config(),
        getattr(config.get_text_config(), "num_attention_heads", None),
    )
    # no attention, or that of latents
    if not heads or getattr(text, "kv_lora_rank", None):
        return
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if not CPUAttentionBackend.supports_head_size(head_size):
        allowed = ", ".join(map(str, CPUAttentionBackend.get_supported_head_sizes()))
        raise ModelError(
            f"model {model!r} has attention heads of {head_size} values, which vLLM lacks on CPUs"
            f" (there are {allowed}); choose another model, or a GPU"
        )


def cpu_isa(dtype: torch.dtype, head_size: int) -> str:
    """The name of vLLM's kernel for a compute dtype and head size, but for AMX's, which QaRL's
    engines do not run (`quant.kernels.vllm_cpu.attention`).
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, _BLOCK, head_size)
    return "vec" if isa == "amx" else isa
