"""LoRA on a `LowBitModel`: which layers are adapted, and what takes the masters' place as what is
trained.

The base (every weight the model came with) is frozen; the factors A and B of the targeted layers'
adapters become the model's masters, named "model.layers.0.self_attn.q_proj.lora_A". Fused experts
get a factor pair an expert over gate and up together, and one over down:
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
from qarl.quant.runtime.shards import whole_shape
from qarl.quant.schemes import is_protected

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.([^.]+)$")


class LoraError(InputError, heading="LoRA"):
    """LoRA targets or a rank that do not fit the model."""


def adapted_weights(
    shapes: Mapping[str, tuple[int, int]], model_type: str, config: LoraConfig
) -> list[str]:
    """The weights that get an adapter, in the model's order: names of linear layers, and
    "….experts.gate_up_proj" or "….experts.down_proj" for all experts of a layer.

    shapes: see `quant.checkpoint.shapes.weight_shapes`. Raises `LoraError` for a target that
    matches nothing, one that names a layer which stays frozen, targets that take part of a layer's
    experts, and a rank beyond a weight's smaller dimension.
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
    taken = {weights[layer] for layer in chosen}
    missed = next(
        (layer for layer in shapes if weights[layer] in taken and layer not in chosen),
        None,
    )
    if missed is not None:
        raise LoraError(
            f"learner.lora.targets take part of {weights[missed]!r} and leave out {missed!r}, but"
            " all experts of a layer are adapted alike, gate and up as one; match all of them (for"
            f" example '{missed.rpartition('.experts.')[0]}.experts.*') or none"
        )
    return list(dict.fromkeys(weights[layer] for layer in shapes if layer in chosen))


def _matched(targets: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The layers that targets match; all that can be adapted where there are none."""
    free = [layer for layer in layers if not is_protected(layer)]
    matched = [] if targets else free
    for target in targets:
        new = matching(target, free)
        if not new and matching(target, layers):
            raise LoraError(
                f"LoRA target {target!r} matches {matching(target, layers)[0]!r}, which stays"
                " frozen: output heads and routers are not adapted; leave it out"
            )
        if not new:
            raise LoraError(
                f"LoRA target {target!r} matches no linear layer of the model;"
                f" {nearest_names(target, free)}"
            )
        matched += new
    return matched


def _weight_of(layer: str, names: ExpertLayout | None) -> str:
    """The name of the weight a layer's matrix is in: itself, or the stack of its experts."""
    expert = _EXPERT.match(layer)
    if expert is None or names is None:
        return layer
    return f"{expert[1]}.{'down_proj' if expert[2] == names.down else 'gate_up_proj'}"


def add_adapters(model: LowBitModel, config: LoraConfig, seed: int) -> None:
    """Freeze every weight; the factors of adapters become the model's masters.

    seed: A is drawn from it on the CPU, in the model's order, so that every learner process has the
    same. The weight version stays that of the base, for every B is zero. Raises what
    `adapted_weights` raises, before anything changes.
    """
    adapted = adapted_weights(model.shapes, model.config.model_type, config)
    generator = torch.Generator().manual_seed(seed)
    masters: dict[str, nn.Parameter] = {}
    for name in adapted:
        adapter = _attach(model, name, config, generator)
        masters |= {f"{name}.lora_A": adapter.lora_A, f"{name}.lora_B": adapter.lora_B}
    model.train_only(masters, adapted)


def _attach(
    model: LowBitModel, name: str, config: LoraConfig, generator: torch.Generator
) -> Adapter:
    """Give a weight its adapter, by a name of `adapted_weights`."""
    module, _, stack = name.rpartition(".")
    layer, place = model.linears.get(name), 0
    if layer is None:
        layer, place = model.experts[module], ("gate_up_proj", "down_proj").index(stack)
    adapter = Adapter(layer.masters[place], config.rank, config.alpha, generator)
    layer.adapt(place, adapter.to(model.device))
    return adapter


def describe_adapters(model: LowBitModel, config: LoraConfig) -> str:
    """What is trained and what is frozen, in one line for people."""
    trained = sum(whole_shape(p).numel() for p in model.masters.values())
    base = sum(whole_shape(p).numel() for p in model.loaded.values())
    names = family_of(model.config.model_type).experts
    weights = dict.fromkeys(_weight_of(layer, names) for layer in model.shapes)
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
