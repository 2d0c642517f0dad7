"""Attention over full sequences by the kernel that vLLM's engine runs on CPUs.

It has the same bits in prefill and in decoding. The kernel reads keys and values from a paged
cache, so each call fills a temporary one.

The kernel goes through the keys tile by tile with a running maximum, so the tiles decide a token's
last bits. The width of a tile depends on how many queries are computed together, which depends on
the number of threads and on the other sequences. A token that is decoded alone has tiles of about
16,000 keys. A token that is prefilled among 600 others has tiles of 640 keys (head size 64) or 320
(head size 128). Engine and learner therefore both cut every sequence's queries into requests so
short that the kernel takes its widest tile for all of them (`short_requests`). The tiles are then
those of a token decoded alone.

Source: vLLM 0.32, `vllm.v1.attention.backends.cpu_attn` and `csrc/cpu/cpu_attn_impl.hpp`.

Axes: N queries of all sequences, S keys of all sequences, B sequences, H heads, G heads of keys and
values, D head size, R requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from qarl.configs.errors import ModelError
from qarl.quant.kernels.base import Scoring
from qarl.quant.runtime.answers import keep_answer, read_answer

_BLOCK = 32
"""Tokens of a page, the fewest that the kernel takes.

The size of a page changes no bit (tests/quant/test_attention.py).
"""
_ROWS_OF_ISA = {"vec": 8, "vec16": 16}
"""Rows (queries times the heads that share a key head) that a kernel multiplies at once, by name.

It is `MaxQHeadNumPerIteration` in vLLM's sources. A request with no more rows gets the widest tile.
"""
_WIDEST_WINDOW = 2048
"""Tokens of the longest sliding window that always fits into one tile.

With 256 KiB of level-2 cache a tile has about 3,800 keys. If a window extends over several tiles,
the first tile begins at the start of the window of the request's first query.
"""


@dataclass(frozen=True)
class Requests:
    """Requests into which N queries are cut, in the form that the kernel takes."""

    start: torch.Tensor
    """First query of each request, followed by N, int32 [R + 1]."""
    seen: torch.Tensor
    """Number of keys that each request's last query sees, int32 [R]."""
    sequence: torch.Tensor
    """Number of the sequence that each request is a part of, int64 [R]."""


def queries_per_request(isa: str, heads_per_key_head: int, window: int | None) -> int:
    """Return the largest number of queries of a request with which its keys get the widest tiles.

    For an unknown kernel it is 1, because one query has the widest tile in every kernel.

    Args:
        isa: name of the kernel (`cpu_isa`).
        heads_per_key_head: H / G.
        window: sliding window in tokens, or None.
    """
    rows = _ROWS_OF_ISA.get(isa)
    if rows is None or (window is not None and window > _WIDEST_WINDOW):
        return 1
    # The kernel shares a key head's tile among its heads only if they fill its rows evenly.
    return rows // heads_per_key_head if rows % heads_per_key_head == 0 else rows


def short_requests(start: torch.Tensor, seen: torch.Tensor, queries: int) -> Requests:
    """Cut each sequence's queries into requests of at most `queries` queries.

    Args:
        start: first query of each sequence, followed by N, integer [B + 1].
        seen: number of keys that each sequence's last query sees, integer [B].
        queries: largest number of queries of a request.
    """
    lengths = start.diff().long()
    parts = (lengths + queries - 1) // queries
    sequence = torch.arange(len(lengths)).repeat_interleave(parts)
    # Number of each request within its sequence, and the end of its queries there.
    number = torch.arange(len(sequence)) - (parts.cumsum(0) - parts)[sequence]
    end = torch.minimum((number + 1) * queries, lengths[sequence])
    counts = end - number * queries
    return Requests(
        start=torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32),
        seen=(seen.long()[sequence] - lengths[sequence] + end).to(torch.int32),
        sequence=sequence,
    )


def sees_pictures_whole(layer: Any, layers: Iterable[Any]) -> bool:
    """Return whether a picture's tokens see all of it in a layer, if they do in any.

    In Gemma 3 they do in all, in Gemma 4 in those with a window, which vLLM marks.

    Args:
        layer: vLLM's `Attention`.
        layers: all of the model's.
    """
    mark = "mm_prefix_clamp_sliding_window"
    return getattr(layer, mark, False) or not any(getattr(other, mark, False) for other in layers)


def separate_pictures(start: torch.Tensor, seen: torch.Tensor, sees: torch.Tensor) -> Requests:
    """Cut sequences where a query sees later keys than itself, which then is a sequence alone.

    Args:
        start: first query of each sequence, followed by N, integer [B + 1].
        seen: number of keys that each sequence's last query sees, integer [B].
        sees: number of keys that each query sees, int64 [N].
    """
    lengths = start.diff().long()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    # number of keys up to each query, itself included
    before = torch.arange(1, len(sequence) + 1) + (seen.long() - lengths.cumsum(0))[sequence]
    alone = sees > before
    begins = alone | torch.cat([alone.new_zeros(1), alone[:-1]])
    begins[start[:-1].long()] = True
    first = begins.nonzero().flatten()
    edges = torch.cat([first, first.new_tensor([len(sequence)])])
    return Requests(edges.to(torch.int32), sees[edges[1:] - 1].to(torch.int32), sequence[first])


def all_requests(
    start: torch.Tensor, seen: torch.Tensor, queries: int, sees: torch.Tensor | None
) -> Requests:
    """Return `short_requests`, and of queries that see later keys than themselves one for each.

    One query has the widest tiles of keys in every kernel, so it has the bits of a token that is
    decoded after these keys. sees: see `separate_pictures`, or None.
    """
    if sees is None:
        return short_requests(start, seen, queries)
    parts = separate_pictures(start, seen, sees)
    requests = short_requests(parts.start, parts.seen, queries)
    return replace(requests, sequence=parts.sequence[requests.sequence])


def cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    lengths: Sequence[int],
    seen: Sequence[int],
    sinks: torch.Tensor | None = None,
    sees: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each of several sequences that follow one another.

    Args:
        q: queries [N, H, D], in a compute dtype.
        k: keys [S, G, D].
        v: values [S, G, D].
        scoring: scoring of queries and keys.
        lengths: number of queries of each sequence, Σ = N; they are those of its last tokens.
        seen: number of keys of each sequence, Σ = S.
        sinks: per head [H], the score of a sink, which is no token; or None.
        sees: number of its sequence's keys that each query sees, int64 [N]. A query that sees later
            keys than itself must see all earlier ones, too: no window may begin after the first.
            None: those before it and itself.

    Returns:
        The output [N, H, D] in q's dtype, rounded once.
    """
    from vllm import _custom_ops as ops

    length = torch.tensor(seen, dtype=torch.int32)
    isa = cpu_isa(q.dtype, q.shape[2])
    queries = queries_per_request(isa, q.shape[1] // k.shape[1], scoring.window)
    requests = all_requests(torch.tensor([0, *lengths]).cumsum(0), length, queries, sees)
    pages = (length + _BLOCK - 1) // _BLOCK
    first = (pages.cumsum(0) - pages).to(torch.int32)
    # A token's slot is its position in k and v, shifted by its sequence: from where the sequence
    # begins in k to where its first page begins.
    shift = first * _BLOCK - (length.cumsum(0) - length)
    slots = torch.arange(len(k)) + shift.repeat_interleave(length)
    # The cache is zeroed, because slots behind a sequence's end are multiplied by probabilities of
    # zero, and the product with a NaN would be NaN.
    stored, kind = (torch.uint8, "fp8") if scoring.fp8 else (k.dtype, "auto")
    heads, head_size = k.shape[1:]
    cache = torch.zeros(int(pages.sum()), heads, 2 * _BLOCK, head_size, dtype=stored)
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
        # As in the engine; see `quant.kernels.vllm_cpu.attention`.
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
    """Raise `ModelError` if vLLM's attention on CPUs does not support the model's head size.

    No engine could sample such a model.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    # The model has no attention, or attention over latents.
    if not heads or getattr(text, "kv_lora_rank", None):
        return
    allowed = kept_head_sizes()
    wrong = next((size for size in _head_sizes(text) if size not in allowed), None)
    if wrong is not None:
        raise ModelError(
            f"model {model!r} has attention heads of {wrong} values, which vLLM lacks on CPUs"
            f" (there are {', '.join(map(str, allowed))}); choose another model, or a GPU"
        )


def kept_head_sizes() -> list[int]:
    """Return the head sizes that vLLM's attention on CPUs supports.

    They come from the cache on disk if software and machine are the same, because asking vLLM
    imports most of it: half of the CPU time of `qarl check`.
    """
    cached = read_answer("head-sizes", {})
    if isinstance(cached, list) and cached:
        return cached
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    keep_answer("head-sizes", {}, sizes)
    return sizes


def _head_sizes(config: PretrainedConfig) -> list[int]:
    """Return the sizes of attention heads in a language model, smallest first.

    Layers may differ in it (Gemma 4), and transformers then refuses to read it of the whole.
    """
    different = getattr(config, "is_heterogeneous", False)
    layers = config.per_layer_config if different else [config]
    return sorted(
        {
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
            for layer in layers
        }
    )


def cpu_isa(dtype: torch.dtype, head_size: int) -> str:
    """Return the name of vLLM's kernel for a compute dtype and head size.

    Instead of AMX's kernel, which QaRL's engines do not run (`quant.kernels.vllm_cpu.attention`),
    it names the one for other CPUs.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, _BLOCK, head_size)
    return "vec" if isa == "amx" else isa
