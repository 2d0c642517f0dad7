"""Latent attention (MLA) by the kernel that vLLM's engine decodes with on CPUs.

All heads share one latent a token, from which `kv_b_proj` makes each head's keys and values. The
kernel multiplies with latents instead: a head's part of `kv_b_proj` for keys is applied to its
queries before, and its part for values to the sum after. It takes each query on its own, through
the keys in blocks of 16, so a token's bits do not depend on its batch. But it shares a query's
blocks among all threads, and then merges their sums. So here it runs on one thread at a time, and
many queries are divided among threads instead.

vLLM computes prompts otherwise: it makes keys and values of every head, and sums in fp32 over as
many columns as the prompt has tokens. Engine (`quant.kernels.vllm_cpu.latent`) and learner
therefore both compute a prompt's tokens as tokens that are decoded.

Source: vLLM 0.32, `vllm.model_executor.layers.attention.mla_attention` and
`csrc/cpu/mla_decode.cpp`.

Axes: N queries of all sequences, S keys of all sequences, H heads, L columns of a latent, P columns
of a head's query that are compared with the latent, R columns of a query and a key that are
rotated, V columns of a head's value.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qarl.quant.kernels.cpu_attention import short_requests

COLUMNS = (512, 64)
"""L and R for which vLLM 0.32 has the kernel on CPUs."""
BLOCK = 16
"""Tokens of a page, for which alone vLLM has the kernel."""


_PART = 1 << 16
"""Least number of products of a head's query with a key for which a thread is started, 12 ms."""


class LatentHeads:
    """The two halves of `kv_b_proj`, as products of each head.

    Each is vLLM's unquantized product, whose rows depend on no others
    (`quant.kernels.vllm_cpu.unquantized`). vLLM multiplies all heads in one call of `torch.bmm`,
    which in float32 sums up to three rows in another order than more.

    Args:
        weight: `kv_b_proj`'s weight, dequantized to the compute dtype, [H · (P + V), L].
        heads: H.
        columns: P.
    """

    def __init__(self, weight: Tensor, heads: int, columns: int):
        by_head = weight.detach().unflatten(0, (heads, -1))
        self._keys = [_Product(head[:columns].T) for head in by_head]
        self._values = [_Product(head[columns:]) for head in by_head]

    def absorbed(self, queries: Tensor) -> Tensor:
        """Return queries that are compared with latents: [N, H, P] → [N, H, L]."""
        return _by_head(self._keys, queries)

    def values(self, sums: Tensor) -> Tensor:
        """Return each head's output of its sum of latents: [N, H, L] → [N, H, V]."""
        return _by_head(self._values, sums)


class _Product:
    """Product with a small weight [O, I], by the kernel that vLLM chooses for it."""

    def __init__(self, weight: Tensor):
        from vllm.model_executor.layers import utils

        self._layer: Any = nn.Module()
        self._layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        # Not imported by name, because the plugin replaces it.
        utils.dispatch_cpu_unquantized_gemm(self._layer, remove_weight=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, compute dtype [N, I] → [N, O]."""
        return self._layer.cpu_linear(x, self._layer.weight, None)


def _by_head(products: Sequence[_Product], x: Tensor) -> Tensor:
    """Multiply each head of x, [N, H, I] → [N, H, O]."""
    heads = x.unbind(1)
    return torch.stack(
        [product(head.contiguous()) for product, head in zip(products, heads, strict=True)], dim=1
    )


def dequantized(product: Any, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight that a linear layer's product stands for, transposed: [I, O].

    It is the product with the identity, which has the weight's bits if activations stay in the
    compute dtype. If they are quantized, it is what the kernel makes of the codes of ones.

    Args:
        product: the layer's product, [N, I] → [N, O].
        columns: I.
        dtype: the compute dtype.
        device: the product's device.
    """
    return product(torch.eye(columns, dtype=dtype, device=device))


def paged_latent_attention(
    q: Tensor, cache: Tensor, table: Tensor, seen: Tensor, heads: LatentHeads, scale: float
) -> Tensor:
    """Return attention over a paged cache of latents, in q's dtype: [N, H, V].

    Args:
        q: queries [N, H, P + R], in a compute dtype, rotated.
        cache: latents and rotated keys [pages, BLOCK, L + R], contiguous within a page.
        table: pages of each query's keys, int32 [N, at least as many as it has].
        seen: number of keys of each query, int32 [N].
        heads: the products of `kv_b_proj`.
        scale: factor of the scores.
    """
    rotated = COLUMNS[1]
    queries, positional = q.split([q.shape[-1] - rotated, rotated], dim=-1)
    compared = torch.cat([heads.absorbed(queries), positional], dim=-1)
    return heads.values(_sums(compared, cache, table.contiguous(), seen, scale))


def _sums(q: Tensor, cache: Tensor, table: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return each head's sum of latents, [N, H, L], of queries that are compared with latents,
    [N, H, L + R]. See `paged_latent_attention`.
    """
    sums = q.new_zeros(*q.shape[:2], COLUMNS[0])
    threads = torch.get_num_threads()
    attend = partial(_attend, sums, q, cache, table, seen, scale)
    work = seen.cumsum(0) * q.shape[1]
    parts = max(1, min(threads, int(work[-1]) // _PART))
    # equal numbers of keys, because later queries of a prompt have more
    bounds = torch.searchsorted(work, torch.arange(1, parts) * int(work[-1]) / parts).tolist()
    rows = [slice(*ends) for ends in zip([0, *bounds], [*bounds, len(q)], strict=True)]
    with _one_thread():
        if parts == 1:
            attend(rows[0])
        else:
            with ThreadPoolExecutor(parts) as pool:
                list(pool.map(attend, rows))
    return sums


def _attend(
    sums: Tensor, q: Tensor, cache: Tensor, table: Tensor, seen: Tensor, scale: float, rows: slice
) -> None:
    """Write the sums of some rows; see `_sums`."""
    from vllm import _custom_ops as ops

    with _one_thread():
        ops.mla_decode_kvcache_cpu(sums[rows], q[rows], cache, scale, table[rows], seen[rows])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one OpenMP thread of the calling thread within this context.

    vLLM replaces `torch.set_num_threads` by a function that does nothing. The other threads, which
    vLLM may have bound to cores, stay as they are.
    """
    before = torch.get_num_threads()
    torch._C.set_num_threads(1)
    try:
        yield
    finally:
        torch._C.set_num_threads(before)


def latent_attention(
    q: Tensor,
    latents: Tensor,
    heads: LatentHeads,
    scale: float,
    lengths: Sequence[int],
    seen: Sequence[int],
) -> Tensor:
    """Compute causal latent attention within each of several sequences that follow one another.

    Args:
        q: queries [N, H, P + R], in a compute dtype, rotated.
        latents: latents and rotated keys [S, L + R].
        heads: the products of `kv_b_proj`.
        scale: factor of the scores.
        lengths: number of queries of each sequence, Σ = N; they are those of its last tokens.
        seen: number of keys of each sequence, Σ = S.

    Returns the output [N, H, V] in q's dtype.
    """
    length = torch.tensor(seen, dtype=torch.int32)
    requests = short_requests(torch.tensor([0, *lengths]).cumsum(0), length, 1)
    pages = (length + BLOCK - 1) // BLOCK
    first = (pages.cumsum(0) - pages).to(torch.int32)
    shift = first * BLOCK - (length.cumsum(0) - length)
    slots = torch.arange(len(latents)) + shift.repeat_interleave(length)
    cache = latents.new_zeros(int(pages.sum()), BLOCK, latents.shape[-1])
    cache.view(-1, latents.shape[-1])[slots] = latents
    table = first[:, None] + torch.arange(int(pages.max()), dtype=torch.int32)
    return paged_latent_attention(q, cache, table[requests.sequence], requests.seen, heads, scale)
