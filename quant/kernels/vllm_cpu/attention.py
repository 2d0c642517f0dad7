"""Attention that rounds alike on every CPU.

With AMX vLLM 0.32 rounds the probabilities of bfloat16 attention to bfloat16, block by block under a running maximum,
before they meet the values; without, it keeps them in fp32, as `quant.graph.attention.torch_attention` does. Here
the fp32 kernel runs with AMX too. Remove this when an option of vLLM's chooses the kernel.
"""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


class Fp32AttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's builder, with the kernel of CPUs without AMX."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


class Fp32AttentionBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs with `Fp32AttentionMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """vLLM's hook: what plans a batch's attention and names the kernel."""
        return Fp32AttentionMetadataBuilder


def register_fp32_attention() -> None:
    """Make vLLM use `Fp32AttentionBackend` wherever it would use its own backend for CPUs."""
    register_backend(AttentionBackendEnum.CPU_ATTN)(Fp32AttentionBackend)
