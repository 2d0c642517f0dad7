"""Sizes of published models."""


def qwen3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, tied: bool) -> dict:
    """Fields of a published Qwen3's config.json."""
    return {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": tied, "max_position_embeddings": 32768,
    }  # fmt: skip


PUBLISHED = {
    "qwen3-0.6b": qwen3(1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": qwen3(2048, 28, 16, 8, 6144, True),
    "qwen3-4b": qwen3(2560, 36, 32, 8, 9728, True),
    "qwen3-8b": qwen3(4096, 36, 32, 8, 12288, False),
    "qwen3-30b-a3b": {
        **qwen3(2048, 48, 32, 4, 6144, False),
        "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
