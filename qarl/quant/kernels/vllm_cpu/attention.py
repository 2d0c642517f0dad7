"""Attention that rounds the same on every CPU, on any number of threads and in any batch.

Four faults of vLLM 0.32 are worked around:

- The parts in which vLLM goes through a token's keys, and so the token's last bits, depend on
  threads and batch. Here every batch is cut into short requests (`quant.kernels.cpu_attention` says
  why), and `register` turns off the splitting of a sequence's keys over threads
  (`VLLM_CPU_ATTN_SPLIT_KV`). Remove this when vLLM's kernel has tiles of one width.
- With AMX, vLLM rounds the probabilities of bfloat16 attention to bfloat16, block by block under a
  running maximum, before it multiplies them with the values. Without AMX it keeps them in fp32, as
  `quant.graph.attention.torch_attention` does. Here the fp32 kernel runs with AMX too. Remove this
  when an option of vLLM chooses the kernel.
- vLLM leaves out that tokens of a picture see all of the picture, where a model was trained so
  (Gemma 3, and Gemma 4 in layers with a window). Here each of them is a request of its own, which
  sees the picture's last token. Remove this when vLLM's backend for CPUs supports `mm_prefix`.
- vLLM writes an FP8 cache by truncation (1.1 becomes 1.0), whereas GPUs round to the nearest. Here
  keys and values are rounded before they are written. Remove this when vLLM's kernel rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from qarl.quant.kernels.cpu_attention import (
    all_requests,
    queries_per_request,
    sees_pictures_whole,
)
from qarl.quant.materialize.fp8 import fp8_values


class ExactAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata builder with short requests and with the kernel for CPUs without AMX."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        everywhere = get_layers_from_vllm_config(vllm_config, Attention).values()
        whole = {sees_pictures_whole(layer, everywhere) for layer in layers}
        if len(whole) > 1 and vllm_config.model_config.is_mm_prefix_lm:
            raise NotImplementedError(
                "vLLM plans the attention of all layers together, and tokens of a picture see all"
                " of it in some of them only"
            )
        self._sees_pictures_whole = True in whole
        self._widest_window = max(
            (getattr(layer.impl, "sliding_window", -1) for layer in layers), default=-1
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Plan one batch's attention (vLLM's hook).

        Causal requests, as those of language models are, are cut into short ones.
        """
        if common_attn_metadata.causal is True and not (
            self.is_cross_attention or self.is_encoder_only_attention
        ):
            common_attn_metadata = self._shortened(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _shortened(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Cut a batch's requests into short ones; see `short_requests`."""
        queries = queries_per_request(
            self.isa, self.num_heads // self.num_kv_heads, self._widest_window
        )
        # The tensors may be padded.
        start = batch.query_start_loc[: batch.num_reqs + 1]
        seen = batch.seq_lens[: batch.num_reqs]
        pictures = batch.mm_req_doc_ranges if self._sees_pictures_whole else None
        sees = _sees(start, seen, pictures or {})
        if sees is None and batch.max_query_len <= queries:
            return batch
        requests = all_requests(start, seen, queries, sees)
        return replace(
            batch,
            query_start_loc=requests.start,
            query_start_loc_cpu=requests.start,
            seq_lens=requests.seen,
            num_reqs=len(requests.seen),
            max_query_len=queries,
            block_table_tensor=batch.block_table_tensor[requests.sequence],
        )


def _sees(
    start: Tensor, seen: Tensor, pictures: Mapping[int, Sequence[tuple[int, int]]]
) -> Tensor | None:
    """Return the number of keys that each query sees, int64 [N]; None if all see those before them.

    Args:
        start: first query of each request, followed by N, integer [R + 1].
        seen: number of keys that each request's last query sees, integer [R].
        pictures: request → first and last token of each picture whose tokens see all of it.
    """
    lengths = start.diff().long()
    request = torch.arange(len(lengths)).repeat_interleave(lengths)
    offset = seen.long() - start[1:].long()  # position of a query in its sequence - in the batch
    before = torch.arange(1, len(request) + 1) + offset[request]
    sees = before.clone()
    for number, spans in pictures.items():
        first, end = int(start[number]), int(start[number + 1])
        for begin, last in spans:
            places = slice(
                max(begin - int(offset[number]), first), min(last + 1 - int(offset[number]), end)
            )
            if places.start < places.stop:
                sees[places] = last + 1
    return None if torch.equal(sees, before) else sees


class RoundedCacheImpl(CPUAttentionBackendImpl):
    """vLLM's attention with an FP8 cache that rounds to the nearest e4m3."""

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values [N, G, D] into their slots (vLLM's hook).

        There are no scales to apply, because QaRL's checkpoints have none for the cache.
        """
        if self.is_fp8_kv_cache:
            key = fp8_values(key)
            value = fp8_values(value)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class AttentionBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs with `ExactAttentionMetadataBuilder` and `RoundedCacheImpl`."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the class that fills a layer's cache and attends (vLLM's hook)."""
        return RoundedCacheImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the class that plans a batch's attention and names the kernel (vLLM's hook)."""
        return ExactAttentionMetadataBuilder
