"""Attention that rounds alike on every CPU, on any number of threads and in any batch, and keys and
values that round as on GPUs.

vLLM 0.32 chooses by threads and batch in which parts a token's keys are gone through, and so its
last bits. Here every batch's requests are short ones (`quant.kernels.cpu_attention` says why), and
`register` turns off the splitting of a sequence's keys over threads (`VLLM_CPU_ATTN_SPLIT_KV`).
Remove this when vLLM's kernel has tiles of one width.

With AMX vLLM 0.32 rounds the probabilities of bfloat16 attention to bfloat16, block by block under
a running maximum, before they meet the values; without, it keeps them in fp32, as
`quant.graph.attention.torch_attention` does. Here the fp32 kernel runs with AMX too. Remove this
when an option of vLLM's chooses the kernel.

An FP8 cache is written by cutting bits off in vLLM 0.32 (1.1 becomes 1.0), where GPUs round to the
nearest. Here keys and values come rounded. Remove that when vLLM's kernel rounds.
"""

from dataclasses import replace
from typing import Any

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

from qarl.quant.kernels.cpu_attention import queries_per_request, short_requests
from qarl.quant.materialize.fp8 import fp8_values


class ExactAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder, with the kernel of CPUs without AMX, and requests of few queries."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        self._widest_window = max(
            (getattr(layer.impl, "sliding_window", -1) for layer in layers), default=-1
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """vLLM's hook: plan one batch's attention. Its requests are cut into short ones where they
        are causal, as those of language models are.
        """
        if common_attn_metadata.causal is True and not (
            self.is_cross_attention or self.is_encoder_only_attention
        ):
            common_attn_metadata = self._shortened(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _shortened(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        queries = queries_per_request(
            self.isa, self.num_heads // self.num_kv_heads, self._widest_window
        )
        if batch.max_query_len <= queries:
            return batch
        start, seen = (
            batch.query_start_loc[: batch.num_reqs + 1],
            batch.seq_lens[: batch.num_reqs],
        )
        requests = short_requests(start, seen, queries)
        return replace(
            batch,
            query_start_loc=requests.start,
            query_start_loc_cpu=requests.start,
            seq_lens=requests.seen,
            num_reqs=len(requests.seen),
            max_query_len=queries,
            block_table_tensor=batch.block_table_tensor[requests.sequence],
        )


class RoundedCacheImpl(CPUAttentionBackendImpl):
    """vLLM's attention, whose FP8 cache takes the nearest e4m3."""

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """vLLM's hook: write keys and values [N, G, D] into their slots. No checkpoint of ours has
        scales.
        """
        if self.is_fp8_kv_cache:
            key, value = fp8_values(key), fp8_values(value)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class AttentionBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs with `ExactAttentionMetadataBuilder` and `RoundedCacheImpl`."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """vLLM's hook: what fills a layer's cache and attends."""
        return RoundedCacheImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """vLLM's hook: what plans a batch's attention and names the kernel."""
        return ExactAttentionMetadataBuilder
