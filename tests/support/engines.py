"""Models, and engines that start from their export."""

from pathlib import Path
from typing import Any

import torch

from qarl.configs.load import load_config
from qarl.configs.schema.rollout import RolloutConfig
from qarl.quant.checkpoint.load import load_masters
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import COMPUTE_DTYPES, get_scheme
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.options import VllmOptions
from qarl.sync.export import export_checkpoint
from tests.support.imports import import_libraries
from tests.support.tensors import seeded

SEQUENCES = [
    torch.randint(16, 512, (length,), generator=seeded(length)).tolist() for length in (9, 24, 40)
]


def make_model(
    folder: Path,
    scheme: str,
    dtype="bfloat16",
    layers="[]",
    kernel="vllm",
    **context: Any,
) -> LowBitModel:
    """Return the low-bit model over a folder's masters. layers: rules as `--layers` takes them.
    context: options of `LayerContext`.
    """
    compute = COMPUTE_DTYPES[dtype]
    rules = load_config(None, {"layers": layers}).layers
    masters = load_masters(folder, torch.float32)
    return LowBitModel(
        masters,
        get_scheme(scheme),
        LayerContext(compute, kernel, **context),
        rules=rules,
    )


def start_engine(
    model: LowBitModel, folder: Path, checkpoint: Path, dtype="bfloat16", **rollout: Any
) -> VllmEngine:
    """Start an engine from the model's export, which is written to `checkpoint`. folder: folder of
    its tokenizer. rollout: other fields of the configuration.
    """
    import_libraries()
    export_checkpoint(model, folder, checkpoint)
    fields = {
        "max_prompt_tokens": 32,
        "max_new_tokens": 32,
        "max_num_seqs": 16,
        **rollout,
    }
    return VllmEngine(checkpoint, VllmOptions(RolloutConfig(**fields), dtype))


def answers_when_fresh(
    model: LowBitModel, folder: Path, checkpoint: Path, dtype="bfloat16"
) -> list[list[float]]:
    """Return the answers to `SEQUENCES` of an engine that is started like `start_engine` and then
    closed.
    """
    engine = start_engine(model, folder, checkpoint, dtype)
    answers = engine.logprobs(SEQUENCES)
    engine.close()
    return answers


def disturb(model: LowBitModel, seed: int) -> None:
    """Move every master by noise of the size of its own spread, which no training step does."""
    generator = seeded(seed)
    with torch.no_grad():
        for master in model.masters.values():
            spread = master.std() if master.numel() > 1 else master.abs()
            master.add_(
                torch.randn(master.shape, generator=generator) * spread.clamp_min(0.05) * 0.3
            )
    model.refresh()
