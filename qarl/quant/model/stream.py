"""One weight version by checkpoint names: published and exported tensors, and the audit."""

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
    """Yield every tensor of the deployable checkpoint, layer by layer, none of them copied.

    Args:
        layers: the model's layers.
        parameters: the model's own parameter names, in its order.
        buffers: the persistent buffers, which checkpoints have.
    """
    checkpoint_name = layers.family.checkpoint_name
    for name in parameters:
        written = checkpoint_name(name)
        layer, _, key = written.rpartition(".")
        module, _, own_key = name.rpartition(".")
        experts = checkpoint_name(module)
        if experts in layers.experts:
            yield from _experts_tensors(layers, experts, own_key, written)
        elif layer in layers.linears:
            yield from _linear_tensors(layers, layer, key)
        else:
            yield LowBitTensor(written, layers.copies[name].published)
    for name, buffer in buffers:
        yield LowBitTensor(checkpoint_name(name), buffer)


def _linear_tensors(layers: Layers, layer: str, key: str) -> Iterator[LowBitTensor]:
    """Yield the checkpoint's tensors for a linear layer's weight or bias."""
    linear = layers.linears[layer]
    if key == "bias":
        assert linear.low_bit_bias is not None
        yield LowBitTensor(f"{layer}.bias", linear.low_bit_bias)
    else:
        for suffix, tensor in linear.codes().tensors():
            yield LowBitTensor(f"{layer}.{suffix}", tensor)


def _experts_tensors(layers: Layers, layer: str, key: str, written: str) -> Iterator[LowBitTensor]:
    """Yield the checkpoint's tensors for one of the parameters of fused experts.

    All of a layer's matrices come with the first parameter, unless the checkpoint has the two as
    well. Stacks that are transposed in the checkpoint are copied.

    Args:
        layers: the model's layers.
        layer: checkpoint name of the experts.
        key: the parameter's own name.
        written: its name in the checkpoint.
    """
    experts = layers.experts[layer]
    layout = experts.shape.layout
    if key.endswith("_bias"):
        gate_up_bias, down_bias = experts.low_bit_biases
        yield LowBitTensor(written, down_bias if key == "down_proj_bias" else gate_up_bias)
        return
    stacks = experts.codes().stacks
    if layout.stacked and experts.scheme.quantization is None:
        assert stacks is not None, "unquantized experts are materialized stack by stack"
        gate_up, down = stacks
        codes = (down if key == "down_proj" else gate_up).codes
        stack = codes.view(experts.shape.experts, -1, codes.shape[-1])
        turned = layout.transposed or layout.stored_transposed
        yield LowBitTensor(written, _transposed(stack) if turned else stack)
    elif key == layout.first_stack:
        for suffix, tensor in experts.codes().tensors(layout):
            yield LowBitTensor(f"{layer}.{suffix}", tensor)


def _transposed(stack: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a stack of matrices, each transposed."""
    return stack.transpose(1, 2).contiguous()


def layer_reports(layers: Layers, context: LayerContext) -> list[LayerReport]:
    """Return the learner's part of the audit.

    It lists every linear layer and every layer's experts with the kernel that multiplies them, then
    the routers that no linear layer multiplies.
    """
    dtype = str(context.dtype)
    stack_of = {part.layer: stack for stack in layers.stacks.values() for part in stack.parts}
    # The engine has no layer for an output head that multiplies with the embedding itself (Gemma,
    # Cohere).
    tied_head = layers.engine and layers.stacks.get(layers.engine.embedding)
    reports = [
        LayerReport(
            name=layer.layer,
            scheme=layer.scheme.name,
            group_size=layer.scheme.group_size,
            dtype=dtype,
            kernel=stack_of.get(layer.layer, layer).kernel.name,
        )
        for layer in layers.low_bit()
        if not tied_head or layer not in tied_head.parts
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
