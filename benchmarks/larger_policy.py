"""Policies of 30 million parameters for docs/lab/map.md, with answers of 200 tokens.

python -m benchmarks.larger_policy FOLDER [OUTLIERS …]     # 50 core minutes with bfloat16 units

Writes FOLDER/outliers-F for each factor F. All of them come from one warm start and compute the
same function, but their weights have different ranges. The tokenizer is a BPE of ordinary text.
"""

import copy
import dataclasses
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from qarl.embedded.recipe import (
    RECIPES,
    TinyRecipe,
    initial_model,
    to_stderr,
    warm_start,
    widen_columns,
)
from qarl.embedded.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PHASES = ((6, 64, 90), (12, 32, 40), (24, 24, 60), (24, 24, 90))
"""Phases of the warm start: terms of a question, rows, and steps.

Trained on the longest questions alone, the policy had learned the form after 80 steps and nothing
else. With these phases it was at 0.139 nats a token after the third, and at 0.002 after the last.
"""
RECIPE: TinyRecipe = dataclasses.replace(
    RECIPES["tiny-qwen3-long"],
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=12288,
    warm_start_lr=3e-3,
)
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which Qwen2's and Qwen3's tokenizers split text before they merge bytes."""


def text_tokenizer(recipe: TinyRecipe) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE like Qwen3's on the project's pages and code."""
    files = sorted(
        [
            *ROOT.glob("docs/**/*.md"),
            *(path for path in ROOT.glob("*/**/*.py") if path.resolve() == path),
        ]
    )
    texts = (file.read_text() for file in files if ".venv" not in file.parts)
    return train_tokenizer(
        texts, recipe.vocab_size, recipe.max_position_embeddings, words=QWEN_WORDS
    )


def build(folder: Path, factors: list[float]) -> None:
    """Write a model folder for each outlier factor; the warm start multiplies in bfloat16."""
    torch.manual_seed(RECIPE.seed)
    tokenizer = text_tokenizer(RECIPE)
    model = initial_model(RECIPE, tokenizer)
    to_stderr(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    # without the cache, which would keep the bfloat16 copies of the first weights
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for seed, (terms, rows, steps) in enumerate(PHASES):
            options = {"min_terms": terms, "max_terms": terms}
            phase = dataclasses.replace(
                RECIPE,
                task_options=options,
                warm_start_batch=rows,
                warm_start_steps=steps,
                seed=seed,
            )
            warm_start(model, tokenizer, phase)
    for factor in factors:
        widened = copy.deepcopy(model)
        widen_columns(dict(widened.named_parameters()), factor)
        target = folder / f"outliers-{factor:g}"
        tokenizer.save_pretrained(target, save_jinja_files=False)
        widened.save_pretrained(target)


if __name__ == "__main__":
    outliers = [float(factor) for factor in sys.argv[2:]]
    build(Path(sys.argv[1]), outliers or [1.0, 4.0, 8.0])
