"""Latent attention (MLA) in which a token has the same bits in a prompt, decoded and scored.

vLLM 0.32 computes a prompt by other products and sums than a token that is decoded
(`quant.kernels.latent_attention` says which). Here every token goes through the kernel for
decoding. Three things follow:

- With AMX vLLM has a backend of its own, which rounds probabilities to bfloat16 and splits long
  sequences by threads. The one for all CPUs runs instead; its kernel takes pages of 16 tokens, into
  which longer pages are cut.
- `kv_b_proj` is dequantized by a product with the identity, in every scheme. vLLM looks for its
  weight, which kernels for int8 have taken away, so that W8A8 would not start.
- `kv_b_proj` gets the kernel of any other layer. vLLM would multiply it by torch's, whose rows
  depend on how many there are.

Remove this when vLLM computes prompts and decoded tokens alike on CPUs.

Axes: N tokens of a batch. See also `quant.kernels.latent_attention`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from qarl.quant.kernels.cpu_attention import short_requests
from qarl.quant.kernels.latent_attention import (
    BLOCK,
    LatentHeads,
    dequantized,
    paged_latent_attention,
)


@dataclass(kw_only=True)
class TokenMetadata(AttentionMetadata):
    """Plan of one batch, in which each token is a request of its own."""

    table: Tensor
    """Pages of `BLOCK` tokens of each token's keys, int32 [N, pages]."""
    seen: Tensor
    """Number of keys that each token sees, int32 [N]."""
    num_actual_tokens: int
    """N. This field and those below are read by vLLM's layer, which hands on all tokens as a
    prompt's.
    """
    num_prefills: int
    num_decodes: int = 0
    num_decode_tokens: int = 0


class TokenMetadataBuilder(AttentionMetadataBuilder[TokenMetadata]):
    """Builder of `TokenMetadata`."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TokenMetadata:
        """Plan one batch's attention (vLLM's hook)."""
        batch = common_attn_metadata
        assert batch.causal is True, "latent attention of language models is causal"
        # The tensors may be padded.
        start = batch.query_start_loc[: batch.num_reqs + 1]
        requests = short_requests(start, batch.seq_lens[: batch.num_reqs], 1)
        parts = self.kv_cache_spec.block_size // BLOCK
        table = batch.block_table_tensor[: batch.num_reqs, :, None] * parts + torch.arange(parts)
        # without the pages that a longer sequence would have
        pages = -(-int(requests.seen.max()) // BLOCK)
        return TokenMetadata(
            table=table.flatten(1)[:, :pages].to(torch.int32)[requests.sequence],
            seen=requests.seen,
            num_actual_tokens=len(requests.seen),
            num_prefills=batch.num_reqs,
        )


class TokenImpl(CPUMLAImpl):
    """vLLM's latent attention for CPUs, which computes prompts as it decodes."""

    heads: LatentHeads

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare the products of `kv_b_proj` after each load (vLLM's hook)."""
        layer: Any = self.kv_b_proj
        product = functools.partial(layer.quant_method.apply, layer, bias=None)
        device = torch.device("cpu")
        weight = dequantized(product, self.kv_lora_rank, act_dtype, device).T
        self.heads = LatentHeads(weight, self.num_heads, self.qk_nope_head_dim)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of all tokens into `output` [N, H · V] (vLLM's hook).

        The cache has their latents already.
        """
        columns = kv_c_and_k_pe_cache.shape[-1]
        cache = kv_c_and_k_pe_cache.view(-1, BLOCK, columns)
        plan: TokenMetadata = attn_metadata
        y = paged_latent_attention(q, cache, plan.table, plan.seen, self.heads, self.scale)
        output.copy_(y.flatten(1))


class TokenBackend(CPUMLABackend):
    """vLLM's backend for latent attention on CPUs with `TokenMetadataBuilder` and `TokenImpl`."""

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """Return the class that attends (vLLM's hook)."""
        return TokenImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """Return the class that plans a batch's attention (vLLM's hook)."""
        return TokenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the sizes of pages that are supported (vLLM's hook)."""
        return [MultipleOf(BLOCK)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return whether pages of this many tokens can be cut into `BLOCK` (vLLM's hook)."""
        return block_size is None or block_size % BLOCK == 0


def decode_prompts() -> None:
    """Make vLLM's latent attention compute prompts as it decodes; idempotent.

    This applies to layers that are built afterwards.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_MLA)(TokenBackend)
    register_backend(AttentionBackendEnum.AMX_MLA)(TokenBackend)
    build = MLAAttention.__init__
    process = MLAAttention.process_weights_after_loading
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_for_any_kernel(self: Any, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        if isinstance(self.impl, TokenImpl):
            del self.kv_b_proj._cpu_skip_gemm_dispatch

    @functools.wraps(process)
    def process_by_backend(self: Any, act_dtype: torch.dtype) -> None:
        if isinstance(self.impl, TokenImpl):
            self.impl.process_weights_after_loading(act_dtype)
        else:
            process(self, act_dtype)

    MLAAttention.__init__ = build_for_any_kernel  # type: ignore[method-assign]
    MLAAttention.process_weights_after_loading = process_by_backend  # type: ignore[method-assign]
