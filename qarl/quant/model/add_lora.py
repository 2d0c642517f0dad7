"""LoRA on a `LowBitModel`: adapters of chosen layers are trained instead of the masters.

The base (every loaded weight) is frozen. The factors A and B of the targeted layers' adapters
become the model's masters, named "model.layers.0.self_attn.q_proj.lora_A". Fused experts get two
factor pairs for each expert, one over gate and up together and one over down:
"model.layers.0.mlp.experts.gate_up_proj.lora_A". Embeddings, norms, biases, the output head and
routers stay frozen. `quant.layers.lora` has the arithmetic.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from qarl.configs.errors import InputError
from qarl.configs.schema.lora import LoraConfig
from qarl.quant.checkpoint.families import ExpertLayout, family_of
from qarl.quant.checkpoint.patterns import matching, nearest_names
from qarl.quant.layers.lora import Adapter
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import is_protected

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.([^.]+)$")


class LoraError(InputError, heading="LoRA"):
    """LoRA targets or a rank that do not fit the model."""


def adapted_weights(
    shapes: Mapping[str, tuple[int, int]], model_type: str, config: LoraConfig
) -> list[str]:
    """Return the names of the weights that get an adapter, in the model's order.

    These are names of linear layers, and "….experts.gate_up_proj" or "….experts.down_proj" for all
    experts of a layer.

    Raises `LoraError` for a target that matches nothing or names a layer that stays frozen, for
    targets that match only part of a layer's experts, and for a rank above a weight's smaller
    dimension.

    Args:
        shapes: checkpoint name → (O, I) of each linear layer (`LayerPlan.shapes`).
        model_type: transformers' name of the architecture.
        config: targets and rank.
    """
    chosen = set(_matched(config.targets, list(shapes)))
    for layer in chosen:
        if config.rank > min(shapes[layer]):
            raise LoraError(
                f"learner.lora.rank {config.rank} is beyond the smaller dimension of {layer!r},"
                f" {list(shapes[layer])}; take {min(shapes[layer])} at most, or leave the layer out"
                " of learner.lora.targets"
            )
    names = family_of(model_type).experts
    weights = {layer: _weight_of(layer, names) for layer in shapes}
    adapted = {weights[layer] for layer in chosen}
    missing = (layer for layer in shapes if weights[layer] in adapted and layer not in chosen)
    missed = next(missing, None)
    if missed is not None:
        raise LoraError(
            f"learner.lora.targets take part of {weights[missed]!r} and leave out {missed!r}, but"
            " all experts of a layer are adapted alike, gate and up as one; match all of them (for"
            f" example '{missed.rpartition('.experts.')[0]}.experts.*') or none"
        )
    return list(dict.fromkeys(weights[layer] for layer in shapes if layer in chosen))


def _matched(targets: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return the layers that the targets match; without targets, all layers that can be adapted."""
    adaptable = [layer for layer in layers if not is_protected(layer)]
    matched = [] if targets else adaptable
    for target in targets:
        new = matching(target, adaptable)
        if not new and matching(target, layers):
            raise LoraError(
                f"LoRA target {target!r} matches {matching(target, layers)[0]!r}, which stays"
                " frozen: output heads and routers are not adapted; omit it"
            )
        if not new:
            raise LoraError(
                f"LoRA target {target!r} matches no linear layer of the model;"
                f" {nearest_names(target, adaptable)}"
            )
        matched += new
    return matched


def _weight_of(layer: str, names: ExpertLayout | None) -> str:
    """Return the name of the weight that holds a layer's matrix: its own, or its experts' stack."""
    expert = _EXPERT.match(layer)
    if expert is None or names is None:
        return layer
    return f"{expert[1]}.{'down_proj' if expert[2] == names.down else names.first_stack}"


def add_adapters(model: LowBitModel, config: LoraConfig, seed: int) -> None:
    """Freeze every weight and make the factors of new adapters the model's masters.

    The weight version remains that of the base, because every B is zero. Raises what
    `adapted_weights` raises, before anything changes.

    Args:
        model: changed in place.
        config: targets, rank and alpha.
        seed: A is drawn from it on the CPU, in the model's order, so that every learner process has
            the same values.
    """
    adapted = adapted_weights(model.plan.shapes, model.config.model_type, config)
    generator = torch.Generator().manual_seed(seed)
    masters: dict[str, nn.Parameter] = {}
    for name in adapted:
        adapter = _attach(model, name, config, generator)
        masters |= {f"{name}.lora_A": adapter.lora_A, f"{name}.lora_B": adapter.lora_B}
    model.train_only(masters, adapted)


def _attach(
    model: LowBitModel, name: str, config: LoraConfig, generator: torch.Generator
) -> Adapter:
    """Attach an adapter to a weight, named as in `adapted_weights`, and return it."""
    layer = model.linears.get(name)
    index = 0
    if layer is None:
        module, _, stack = name.rpartition(".")
        layer = model.experts[module]
        index = 1 if stack == "down_proj" else 0
    adapter = Adapter(layer.masters[index], config.rank, config.alpha, generator)
    layer.adapt(index, adapter.to(model.device))
    return adapter


def describe_adapters(model: LowBitModel, config: LoraConfig) -> str:
    """Return one line for people that says what is trained and what is frozen."""
    trained = sum(p.numel() for p in model.masters.values())
    base = sum(p.numel() for p in model.loaded.values())
    layout = family_of(model.config.model_type).experts
    weights = dict.fromkeys(_weight_of(layer, layout) for layer in model.plan.shapes)
    # the same layer of all decoder layers is named once
    frozen = [
        re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in weights if name not in model.adapted
    ]
    names = ", ".join(dict.fromkeys(frozen))
    return (
        f"LoRA: rank {config.rank}, alpha {config.alpha:g} on {len(model.adapted)} of"
        f" {len(weights)} weight matrices; {trained:,} parameters are trained over {base:,} frozen"
        f" ones ({trained / base:.1%}); frozen without adapter: embeddings, norms,"
        f" biases{', ' if names else ''}{names}"
    )
