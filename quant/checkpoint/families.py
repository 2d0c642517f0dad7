"""Model families: what checkpoints, engine and operators make of a transformers `model_type`, one row each.

transformers 5 holds a layer's experts as two 3-D parameters, `mlp.experts.gate_up_proj` [E, 2I, H] and
`mlp.experts.down_proj` [E, H, I]. Checkpoints and vLLM name every expert's three matrices, and some modules in other
words. tests/quant/test_layout.py holds the names to what `save_pretrained` writes.

Axes: E experts, H hidden columns, I expert columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from qarl.quant.runtime.shards import whole_shape
from qarl.quant.schemes import SchemeError

STACKED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""vLLM's `packed_modules_mapping` of Llama, Mistral, Qwen2, Qwen3 and their mixtures of experts."""


@dataclass(frozen=True)
class ExpertLayout:
    """A checkpoint's names of an expert's matrices."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    @property
    def projections(self) -> tuple[str, str, str]:
        """Gate, up and down, in checkpoint order."""
        return self.gate, self.up, self.down


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


@dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`.

    experts: the names of experts' matrices; None for a dense model. renamed: parts of other names that differ,
    (transformers', the checkpoint's). stacked: what the engine multiplies as one, and so gives one scheme and one
    tensor-wide scale → its parts. engine_operators: whether `quant.operators` computes its decoder as vLLM does.
    quantizes_router: whether vLLM multiplies the router in the scheme the checkpoint says. windowed: whether
    `config.sliding_window` alone limits attention; elsewhere `config.layer_types` says which layers it does.
    centred_norms: whether norms' weights are kept less 1.
    """

    experts: ExpertLayout | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: STACKED)
    engine_operators: bool = False
    quantizes_router: bool = True
    windowed: bool = False
    centred_norms: bool = False

    def checkpoint_name(self, name: str) -> str:
        """A module's or parameter's name as checkpoints have it."""
        for ours, written in self.renamed:
            name = name.replace(ours, written)
        return name


FAMILIES: dict[str, Family] = {
    "llama": Family(engine_operators=True),
    "mistral": Family(engine_operators=True, windowed=True),
    "qwen2": Family(engine_operators=True),
    "qwen3": Family(engine_operators=True),
    "gemma": Family(engine_operators=True, centred_norms=True),
    "gemma3_text": Family(engine_operators=True, centred_norms=True),
    "qwen3_moe": Family(ExpertLayout(), engine_operators=True, windowed=True),
    "mixtral": Family(
        ExpertLayout("w1", "w3", "w2"),
        renamed=((".mlp.", ".block_sparse_moe."),),
        engine_operators=True,
        quantizes_router=False,
        windowed=True,
    ),
    "qwen2_moe": Family(ExpertLayout()),
    "deepseek_v2": Family(ExpertLayout()),
    "deepseek_v3": Family(ExpertLayout()),
    "glm4_moe": Family(ExpertLayout()),
    "olmoe": Family(ExpertLayout()),
    "dots1": Family(ExpertLayout()),
    "ernie4_5_moe": Family(ExpertLayout(), renamed=((".gate.moe_statics.", ".moe_statics."),)),
}


def family_of(model_type: str) -> Family:
    """The row of a model type. Those without one are taken for dense models in transformers' own names, run by
    transformers' operators."""
    return FAMILIES.get(model_type, Family())


def attention_windows(config: PretrainedConfig) -> list[int | None]:
    """Of every decoder layer, how many tokens one sees, itself the last; None where it sees all before it."""
    everywhere = ["sliding_attention" if family_of(config.model_type).windowed else "full_attention"]
    kinds = getattr(config, "layer_types", None) or everywhere * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def fused_experts(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Every module of fused experts, by name.

    Raises `SchemeError` for a model whose 3-D parameters are of no layout known here: they would be missed.
    """
    for name, module in model.named_modules():
        three = {key for key, p in module.named_parameters(recurse=False) if len(whole_shape(p)) == 3}
        if not three:
            continue
        known = family_of(model.config.model_type).experts is not None and three == {"gate_up_proj", "down_proj"}
        if not known or any(key not in three for key, _ in module.named_parameters()):
            mixtures = sorted(kind for kind, family in FAMILIES.items() if family.experts)
            raise SchemeError(
                f"{name!r} holds fused experts {sorted(three)} of model type {model.config.model_type!r}, whose "
                f"checkpoint layout is not known here; known are {', '.join(mixtures)} with gate_up_proj and "
                "down_proj and no biases"
            )
        yield name, module
