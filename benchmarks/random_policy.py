"""Untrained policies of several families, for comparing kernels without real weights.

    python -m benchmarks.random_policy random-gemma3 FOLDER
    python -m benchmarks mismatch --model FOLDER

Their output heads are scaled up, so that distributions have peaks.
"""

import argparse
import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from qarl.embedded.recipe import RECIPES, ensure_recipe

_LIKE = {"random-qwen3": "tiny-qwen3", "random-qwen3-moe": "tiny-qwen3-moe"}
"""Name → the embedded policy with the same sizes."""

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Sizes of random models, here and in `benchmarks.families`."""
_HEADED = {**SIZES, "head_dim": 32}
_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
_WINDOW = 24
"""Sliding window in tokens: shorter than the sequences that benchmarks sample."""
_PEAK = 12.0
"""Factor on the output head.

Untrained weights give flat distributions, which would hide the effect of mismatch on peaks.
"""

_CONFIGS: dict[str, PretrainedConfig] = {
    "random-llama": LlamaConfig(**_HEADED),
    "random-mistral": MistralConfig(**_HEADED, sliding_window=_WINDOW),
    "random-gemma3": Gemma3TextConfig(
        **_HEADED,
        sliding_window=_WINDOW,
        layer_types=_LAYERS,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "linear",
                "factor": 8.0,
                "rope_theta": 1_000_000.0,
            },
        },
        query_pre_attn_scalar=32,
    ),
}

NAMES = (*_LIKE, *_CONFIGS)


@contextmanager
def random_policy(name: str, seed: int) -> Iterator[Path]:
    """Yield the model folder of a policy in `NAMES`; it is deleted when the context ends."""
    with TemporaryDirectory() as temporary:
        write_policy(name, Path(temporary), seed)
        yield Path(temporary)


def write_policy(name: str, folder: Path, seed: int) -> None:
    """Write the model folder of a policy in `NAMES`."""
    config = _CONFIGS.get(name)
    like = name if name in _LIKE else "random-qwen3"
    untrained = dataclasses.replace(
        RECIPES[_LIKE[like]], warm_start_steps=0, tie_word_embeddings=False, seed=seed
    )
    source = ensure_recipe(like, untrained)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    torch.manual_seed(seed)
    if config is None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # norms are initialized to constants, which would hide errors in multiplying by them
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.0
    model.get_parameter("lm_head.weight").data *= _PEAK  # all of these models have an untied head
    model.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_policy(options.name, options.folder, options.seed)
