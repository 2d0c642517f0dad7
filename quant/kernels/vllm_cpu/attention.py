"""Attention that rounds alike on every CPU, and keys and values that round as on GPUs.

With AMX vLLM 0.32 rounds the probabilities of bfloat16 attention to bfloat16, block by block under a running maximum,
before they meet the values; without, it keeps them in fp32, as `quant.graph.attention.torch_attention` does. Here
the fp32 kernel runs with AMX too. Remove this when an option of vLLM's chooses the kernel.

An FP8 cache is written by cutting bits off in vLLM 0.32 (1.1 becomes 1.0), where GPUs round to the nearest. Here keys
and values come rounded. Remove that when vLLM's kernel rounds.
"""

from typing import Any

from torch import Tensor, nn
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from qarl.quant.materialize.fp8 import fp8_values


class Fp32AttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder, with the kernel of CPUs without AMX."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


class RoundedCacheImpl(CPUAttentionBackendImpl):
    """vLLM's attention, whose FP8 cache takes the nearest e4m3."""

    def do_kv_cache_update(
        self, layer: nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """vLLM's hook: write keys and values [N, G, D] into their slots. No checkpoint of ours has scales."""
        if self.is_fp8_kv_cache:
            key, value = fp8_values(key), fp8_values(value)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class AttentionBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs with `Fp32AttentionMetadataBuilder` and `RoundedCacheImpl`."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """vLLM's hook: what fills a layer's cache and attends."""
        return RoundedCacheImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """vLLM's hook: what plans a batch's attention and names the kernel."""
        return Fp32AttentionMetadataBuilder
