"""Small random mixtures of experts of every layout that quant/checkpoint/families.py knows."""

import functools
import operator
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.support.cases import cases

PARTS: dict[str, dict[str, Any]] = cases(__file__, "parts")
"""Fields that several families share. vLLM's latent attention on CPUs has only 512 + 64 columns.

Only vLLM reads the fields of corrected routing; transformers knows no other routing for these
models.
"""
SIZES = PARTS["sizes"]
CONFIGS: dict[str, PreTrainedConfig] = {
    kind: getattr(transformers, name)(
        **functools.reduce(operator.or_, (PARTS[part] for part in parts), SIZES | own)
    )
    for kind, (name, parts, own) in cases(__file__, "kinds").items()
}


def random_moe(
    config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Draw every parameter and persistent buffer, because biases that are zero at initialization
    would hide mistakes.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    kept = model.state_dict()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in kept:
                noise = torch.randn(tensor.shape, generator=generator)
                one = 1.0 if tensor.ndim == 1 and name.endswith("norm.weight") else 0.0
                tensor.copy_(
                    one + noise * (0.1 if tensor.ndim == 1 else 1.5 * tensor.shape[-1] ** -0.5)
                )
    return model.eval()


def with_tokenizer(kind: str, policy: Path, folder: Path) -> Path:
    """Write `random_moe` of that kind with the tokenizer of an embedded policy,
    which engines need.
    """
    random_moe(CONFIGS[kind]).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy / name, folder / name)
    return folder
