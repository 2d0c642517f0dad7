"""Random Qwen3 models of two sizes, to measure on where no weights are at hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAD = 0
END = 1


@dataclass(frozen=True)
class BenchModel:
    """A random Qwen3 and the batch it is measured on. config: fields of `Qwen3Config`. tokens: the
    median completion's; no completion is longer than eight times as many.
    """

    config: dict[str, Any]
    prompts: int
    samples: int
    tokens: int


def qwen3(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    head_dim: int,
) -> dict[str, Any]:
    """Fields of `Qwen3Config`, half as many key-value heads as heads."""
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
"""tiny: the embedded policy's architecture, 0.4 million parameters. 150m: 149 million in 12 layers
and a tied output head of 65,536 words, 50 of them in the embedding.
"""


def write_model(model: BenchModel, folder: Path, seed: int) -> int:
    """Random weights in fp32 with a tokenizer of one word a token, in `folder`; returns the
    parameters.
    """
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
    """A tokenizer of one word a token, in `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(
        folder
    )
