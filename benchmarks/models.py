"""Random Qwen3 models of two sizes, for measurements that need no real weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD = 0
END = 1


@dataclass(frozen=True)
class BenchModel:
    """Random Qwen3 and the batch it is measured on."""

    config: dict[str, Any]
    """Fields of `Qwen3Config`."""
    prompts: int
    """Number of prompts."""
    samples: int
    """Completions per prompt."""
    tokens: int
    """Median tokens of a completion; no completion is longer than eight times this."""


def qwen3(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    head_dim: int,
) -> dict[str, Any]:
    """Return the fields of `Qwen3Config`, with half as many key-value heads as heads."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }


MODELS = {
    "tiny": BenchModel(qwen3(512, 128, 256, 2, 4, 32), prompts=8, samples=8, tokens=48),
    "150m": BenchModel(qwen3(65536, 768, 2816, 12, 12, 64), prompts=4, samples=8, tokens=64),
}
"""Models by name.

`tiny` has the embedded policy's architecture and 0.4 million parameters. `150m` has 149 million in
12 layers and a tied output head of 65,536 words; 50 million of them are the embedding.
"""


def write_model(model: BenchModel, folder: Path, seed: int) -> int:
    """Write random fp32 weights and a tokenizer with one word per token; return the parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config: dict[str, Any] = {
        **model.config,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "dtype": "float32",
    }
    policy = Qwen3ForCausalLM(Qwen3Config(**config))
    policy.save_pretrained(folder)
    write_tokenizer(model.config["vocab_size"], folder)
    return sum(p.numel() for p in policy.parameters())


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer with one word per token to `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(
        folder
    )
