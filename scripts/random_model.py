"""Write a model of a real one's shape with random weights.

    python scripts/random_model.py SHAPE FOLDER [--layers N] [--tokenizer FOLDER]

The tokenizer is the embedded policy's unless another folder has one. Use it to measure memory and
speed on machines that cannot download models.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from qarl.embedded.recipe import ensure_tiny

SHAPES = {
    "tiny": Qwen3Config(
        vocab_size=50304,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        norm_topk_prob=True,
    ),
}
"""Configurations from the real models' config.json; `tiny` is for rehearsals on CPUs."""


def main() -> None:
    """Write the folder; leave an existing one unchanged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="decoder layers; without it the model's")
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer's files")
    known = parser.parse_args()
    if known.folder.exists():
        return
    partial = known.folder.with_name(f"{known.folder.name}.partial")
    config = SHAPES[known.shape]
    source = known.tokenizer or ensure_tiny("tiny-qwen3")
    config.num_hidden_layers = known.layers or config.num_hidden_layers
    config.layer_types = config.layer_types and config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(partial)
    for file in source.iterdir():
        if file.suffix not in (".safetensors", ".lock") and file.name != "config.json":
            shutil.copy(file, partial)
    partial.rename(known.folder)


if __name__ == "__main__":
    main()
