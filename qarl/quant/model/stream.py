"""One weight version in the checkpoint's names: the tensors that are published and exported, and
the audit's view.
"""

from collections.abc import Iterable, Iterator

import torch

from qarl.quant.layers.context import LayerContext
from qarl.quant.model.layers import Layers
from qarl.quant.types import LayerReport, LowBitTensor


def checkpoint_tensors(
    layers: Layers,
    parameters: Iterable[str],
    buffers: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[LowBitTensor]:
    """Every tensor of the deployable checkpoint, layer by layer, none of them copied.

    parameters: the model's names of its own, in its order. buffers: those that checkpoints keep.
    """
    named = layers.family.checkpoint_name
    for name in parameters:
        layer, _, key = named(name).rpartition(".")
        module, _, own = name.rpartition(".")
        if named(module) in layers.experts:
            yield from _experts_tensors(layers, named(module), own, named(name))
        elif layer in layers.linears:
            yield from _linear_tensors(layers, layer, key)
        else:
            yield LowBitTensor(named(name), layers.copies[name].published)
    for name, buffer in buffers:
        yield LowBitTensor(named(name), buffer)


def _linear_tensors(layers: Layers, layer: str, key: str) -> Iterator[LowBitTensor]:
    linear = layers.linears[layer]
    if key == "bias":
        assert linear.low_bit_bias is not None
        yield LowBitTensor(f"{layer}.bias", linear.low_bit_bias)
    else:
        for suffix, tensor in linear.codes().tensors():
            yield LowBitTensor(f"{layer}.{suffix}", tensor)


def _experts_tensors(layers: Layers, layer: str, key: str, written: str) -> Iterator[LowBitTensor]:
    """All of a layer's, at the first of its two parameters; unless the checkpoint has those two,
    too. key, written: the parameter's own name, and the checkpoint's.
    """
    experts = layers.experts[layer]
    layout, stacks = experts.shape.layout, experts.codes().stacks
    if layout.stacked and experts.scheme.quantization is None:
        assert stacks is not None, "unquantized experts are materialized stack by stack"
        stack = stacks[key == "down_proj"].codes
        yield LowBitTensor(written, stack.view(experts.shape.experts, -1, stack.shape[-1]))
    elif key == "gate_up_proj":
        for suffix, tensor in experts.codes().tensors(layout):
            yield LowBitTensor(f"{layer}.{suffix}", tensor)


def layer_reports(layers: Layers, context: LayerContext) -> list[LayerReport]:
    """The learner's side of the audit: every linear layer and every layer's experts, with the
    kernel that multiplies them; then routers that no linear layer multiplies.
    """
    dtype = str(context.dtype)
    multiplies = {part.layer: stack for stack in layers.stacks.values() for part in stack.parts}
    # The engine has no layer for an output head that multiplies with the embedding itself (Gemma,
    # Cohere).
    looked_up = layers.engine and layers.stacks.get(layers.engine.embedding)
    reports = [
        LayerReport(
            name=layer.layer,
            scheme=layer.scheme.name,
            group_size=layer.scheme.group_size,
            dtype=dtype,
            kernel=multiplies.get(layer.layer, layer).product.name,
        )
        for layer in layers.low_bit()
        if not looked_up or layer not in looked_up.parts
    ]
    routers = [
        name
        for name in map(layers.family.checkpoint_name, layers.routers)
        if name not in layers.linears
    ]
    return reports + [
        LayerReport(name=name, scheme="bf16", group_size=None, dtype=dtype, kernel="unquantized")
        for name in routers
    ]
