"""How checkpoints name what transformers fuses or renames: experts one by one, and some modules in other words.

transformers 5 holds a layer's experts as two 3-D parameters, `mlp.experts.gate_up_proj` [E, 2I, H] and
`mlp.experts.down_proj` [E, H, I]. Checkpoints and vLLM name every expert's three matrices. This is the one place that
knows both; tests/quant/test_layout.py holds it to what `save_pretrained` writes.

Axes: E experts, H hidden columns, I expert columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from quant.runtime.zero3 import whole_shape
from quant.schemes import SchemeError

FUSED_IN_ENGINE = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What engines stack into one product and so give one scheme and one tensor-wide scale: vLLM's
`packed_modules_mapping` of Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts."""


@dataclass(frozen=True)
class ExpertLayout:
    """gate, up, down: a checkpoint's names of an expert's matrices. renamed: parts of other names that differ,
    (transformers', the checkpoint's)."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def projections(self) -> tuple[str, str, str]:
        """Gate, up and down, in checkpoint order."""
        return self.gate, self.up, self.down

    def checkpoint_name(self, name: str) -> str:
        """A module's or parameter's name as checkpoints have it."""
        for ours, written in self.renamed:
            name = name.replace(ours, written)
        return name


@dataclass(frozen=True)
class ExpertsShape:
    """A layer's experts. experts: E. top_k: K experts a token. hidden: H. intermediate: I. activation: between gate and
    down projection, by transformers' name ("silu"). layout: the checkpoint's names."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str
    layout: ExpertLayout


_QWEN = ExpertLayout()
_LAYOUTS = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "dots1"), _QWEN),
    "ernie4_5_moe": ExpertLayout(renamed=((".gate.moe_statics.", ".moe_statics."),)),
    "mixtral": ExpertLayout("w1", "w3", "w2", renamed=((".mlp.", ".block_sparse_moe."),)),
}


def expert_layout(model_type: str) -> ExpertLayout:
    """The layout of a model type; dense models have the common one, of which they use no expert name."""
    return _LAYOUTS.get(model_type, _QWEN)


def fused_experts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Every module of fused experts, by name.

    Raises `SchemeError` for a model whose 3-D parameters are of no layout known here: they would be missed.
    """
    for name, module in model.named_modules():
        three = {key for key, p in module.named_parameters(recurse=False) if len(whole_shape(p)) == 3}
        if not three:
            continue
        known = model.config.model_type in _LAYOUTS and three == {"gate_up_proj", "down_proj"}
        if not known or any(True for _ in module.named_parameters() if _[0] not in three):
            raise SchemeError(
                f"{name!r} holds fused experts {sorted(three)} of model type {model.config.model_type!r}, whose "
                f"checkpoint layout is not known here; known are {', '.join(sorted(_LAYOUTS))} with gate_up_proj and "
                "down_proj and no biases"
            )
        yield name, module
