"""Attention by the kernel vLLM's engine runs on CPUs, over whole sequences: the same bits in prefill and in decoding.

The kernel reads keys and values from a paged cache, so a call fills one of its own, which lives as long as the call.
Source: vLLM 0.32, `vllm.v1.attention.backends.cpu_attn`.

Axes: N tokens of all sequences, S tokens they see, H heads, G heads of keys and values, D head size.
"""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from qarl.configs.errors import ModelError
from qarl.quant.kernels.base import Scoring

_BLOCK = 32
"""Tokens of a page: the least the kernel takes. Its size changes no bit (tests/quant/test_attention.py)."""


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

    q: [N, H, D], k, v: [S, G, D], in a compute dtype. lengths: queries of each sequence, Σ = N, those of its last
    tokens. seen: tokens of each, Σ = S. sinks: a score a head [H] of what no token is, or None. Returns
    [N, H, D] in that dtype, rounded once.
    """
    from vllm import _custom_ops as ops

    length = torch.tensor(seen, dtype=torch.int32)
    start = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    pages = (length + _BLOCK - 1) // _BLOCK
    first = (pages.cumsum(0) - pages).to(torch.int32)
    # From where a sequence's tokens are in k and v to its slots: its first page's less what came before it.
    slots = torch.arange(len(k)) + (first * _BLOCK - (length.cumsum(0) - length)).repeat_interleave(length)
    # Zeros: what lies behind a sequence's end is multiplied by probabilities of zero, which no NaN may meet.
    stored, kind = (torch.uint8, "fp8") if scoring.fp8 else (k.dtype, "auto")
    cache = torch.zeros(int(pages.sum()), k.shape[1], 2 * _BLOCK, k.shape[2], dtype=stored)
    keys, values = cache.chunk(2, dim=2)
    isa = cpu_isa(q.dtype, q.shape[2])
    ops.cpu_attn_reshape_and_cache(k.contiguous(), v.contiguous(), keys, values, slots, isa, kv_cache_dtype=kind)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seen),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        seq_lens=length,
        dtype=q.dtype,
        query_start_loc=start,
        causal=True,
        sliding_window_size=scoring.window or -1,
        isa=isa,
        enable_kv_split=False,
    )
    output = torch.empty(q.shape, dtype=q.dtype)
    ops.cpu_attention_with_kv_cache(
        query=q.contiguous(),
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=start,
        seq_lens=length,
        scale=scoring.scale,
        causal=True,
        alibi_slopes=scoring.slopes,
        sliding_window=scoring.window or -1,
        block_table=first[:, None] + torch.arange(int(pages.max()), dtype=torch.int32),
        softcap=scoring.cap,
        scheduler_metadata=plan,
        s_aux=sinks,
        kv_cache_dtype=kind,
    )
    return output


def require_head_size(model: str, config: PretrainedConfig) -> None:
    """Raise `ModelError` for heads of a size that vLLM's attention lacks on CPUs, so that no engine could sample."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text, heads = config.get_text_config(), getattr(config.get_text_config(), "num_attention_heads", None)
    if not heads or getattr(text, "kv_lora_rank", None):  # no attention, or that of latents
        return
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if not CPUAttentionBackend.supports_head_size(head_size):
        allowed = ", ".join(map(str, CPUAttentionBackend.get_supported_head_sizes()))
        raise ModelError(
            f"model {model!r} has attention heads of {head_size} values, which vLLM lacks on CPUs (there are "
            f"{allowed}); choose another model, or a GPU"
        )


def cpu_isa(dtype: torch.dtype, head_size: int) -> str:
    """The name of vLLM's kernel for a compute dtype and head size, but for AMX's, which QaRL's engines do not run
    (`quant.kernels.vllm_cpu.attention`)."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, _BLOCK, head_size)
    return "vec" if isa == "amx" else isa
