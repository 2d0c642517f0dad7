"""The engine's graph over a model of masters: which tensor vLLM loads into each parameter.

A tensor's checkpoint name says which of vLLM's modules takes it (`quant.graph.loading`). vLLM's
linear layers become low-bit layers, even if transformers has a module of its own for them
(routers); everything else becomes a copy.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from qarl.configs.errors import GraphError, NoEngineModelError
from qarl.quant.checkpoint.families import fused_experts, is_gpt_oss, names_of
from qarl.quant.checkpoint.whole import whole_of
from qarl.quant.graph.graph import Graph, Masters
from qarl.quant.graph.kinds import is_convolution, keeps_state, refuse_unknown, undivided
from qarl.quant.graph.loading import trace_loading
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.graph.skeleton import build_skeleton
from qarl.quant.kernels.engine_layers import without_towers
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.layers import Divided, EngineModel, Layers

_CORRECTION = "e_score_correction_bias"
"""End of the names of routers' correction biases."""


def engine_model(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> EngineModel:
    """Return vLLM's modules for this model.

    Raises `GraphError` if vLLM has no such model, and `NoEngineModelError` if it has none on this
    machine, or has one of other sizes.

    Args:
        model: the model of masters.
        shapes: checkpoint name → (O, I) of each linear layer (`LayerPlan.shapes`).
        dtype: the engine's compute dtype.
    """
    whole = whole_of(model.config)
    architecture = type(model).__name__ if whole is None else whole.architecture
    skeleton = build_skeleton(model.config, architecture, None, dtype, _device(model))
    tensors = _checkpoint_tensors(model, shapes)
    sources = trace_loading(skeleton, tensors).sources
    _refuse_shared_head(model, architecture, tensors, sources)
    modules = dict(without_towers(skeleton.module))
    _refuse_unloaded(skeleton.module, architecture, sources)
    _refuse_unread(architecture, model, tensors, sources)
    for name, module in modules.items():
        refuse_unknown(name, module, sources)
    linears = {
        name: module
        for name, module in modules.items()
        if isinstance(module, LinearBase) and not is_convolution(module)
    }
    heads = [name for name, module in modules.items() if isinstance(module, ParallelLMHead)]
    embeddings = [
        name
        for name, module in modules.items()
        if isinstance(module, VocabParallelEmbedding) and name not in heads
    ]
    divided: dict[str, Divided] = {}
    for name, linear in linears.items():
        part = _divided(linear)
        if part is not None:
            divided[name] = part
    reasons = (undivided(name, module) for name, module in modules.items())
    return EngineModel(
        architecture=architecture,
        correction_biases=_correction_biases(modules, sources),
        custom_linears={
            name: module
            for name, module in linears.items()
            if module.params_dtype != dtype or isinstance(module, GateLinear)
        },
        stacked={
            name: tuple(
                layer.removesuffix(".weight") for layer in sources.get((name, "weight"), ())
            )
            for name in linears
        },
        divided=divided,
        biased={name for name, module in linears.items() if module.bias is not None},
        ranks_refusal=next(filter(None, reasons), ""),
        experts={
            name: _experts_of(name, sources)
            for name, module in modules.items()
            if isinstance(module, MoERunner)
        },
        loaded_from=_single_tensors(modules, {*linears, *heads}, sources),
        in_fp32=_in_fp32(modules, sources),
        heads=tuple(heads or embeddings[:1]),
        embedding=embeddings[0] if embeddings else "",
    )


def _refuse_unloaded(
    engine: nn.Module, architecture: str, sources: Mapping[tuple[str, str], Collection[str]]
) -> None:
    """Raise `NoEngineModelError` for a norm into whose weight no tensor of the checkpoint goes.

    An engine would sample by whatever its memory held.
    """
    for name, module in without_towers(engine):
        is_norm = isinstance(module, CustomOp) and "Norm" in type(module).__name__
        weight = module._parameters.get("weight")
        if is_norm and weight is not None and not sources.get((name, "weight")):
            raise NoEngineModelError(
                f"vLLM's {architecture} has a norm {name!r}, for which a checkpoint of this model"
                " has no weight: vLLM's class and transformers' are of different models; take"
                " another model"
            )


def _refuse_unread(
    architecture: str,
    model: PreTrainedModel,
    tensors: Collection[str],
    sources: Mapping[tuple[str, str], Collection[str]],
) -> None:
    """Raise `NoEngineModelError` if vLLM leaves out correction biases of routers, or biases of
    linear layers, so that an engine would compute another model.

    Its loaders may ignore names that end in "bias" (Laguna), and its layers may lack a bias if a
    setting is missing in config.json (GLM-4V's attention_bias).

    tensors: names in the checkpoint.
    """
    checkpoint_name = names_of(model.config).checkpoint_name
    biases = {
        checkpoint_name(f"{name}.bias")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None
    }
    read = {name for names in sources.values() for name in names}
    for name in tensors:
        if name in read:
            continue
        if name.endswith(_CORRECTION):
            raise NoEngineModelError(
                f"vLLM's {architecture} does not load {name!r}, by which a router chooses experts,"
                " so that an engine would choose others; take another model"
            )
        if name in biases:
            raise NoEngineModelError(
                f"vLLM's {architecture} has no bias for {name!r}, so that an engine would compute"
                " another model; if config.json lacks the setting by which vLLM adds it"
                " (attention_bias true), add it as the model's publisher has it, or take another"
                " model"
            )


def _divided(linear: LinearBase) -> Divided | None:
    """Return what a tensor-parallel engine divides of a layer's weight; None if nothing."""
    if linear.disable_tp:
        return None
    if isinstance(linear, RowParallelLinear):
        return "columns"
    if isinstance(linear, QKVParallelLinear):
        return "heads"
    return "rows" if isinstance(linear, ColumnParallelLinear) else None


def _correction_biases(
    modules: Mapping[str, nn.Module], sources: Mapping[tuple[str, str], list[str]]
) -> tuple[str, ...]:
    """Return the checkpoint names of routers' correction biases.

    Such a tensor may be a parameter of another module than the router.
    """
    routers: list[Any] = [m.router for m in modules.values() if isinstance(m, MoERunner)]
    biases = [getattr(router, _CORRECTION, None) for router in routers]
    ids = {id(bias) for bias in biases if bias is not None}
    return tuple(
        source
        for name, module in modules.items()
        for key, parameter in module._parameters.items()
        if id(parameter) in ids
        for source in sources.get((name, key), ())
    )


def _single_tensors(
    modules: Mapping[str, nn.Module],
    multiplied: Collection[str],
    sources: Mapping[tuple[str, str], list[str]],
) -> dict[tuple[str, str], str]:
    """Return (module, parameter) → checkpoint name of what is one tensor there.

    multiplied: names of modules whose weight and bias are left out.
    """
    read = {}
    for name, module in modules.items():
        taken = {"weight", "bias"} if name in multiplied else set()
        for key in {*module._parameters, *module._buffers} - taken:
            if len(sources.get((name, key), ())) == 1:
                read[name, key] = sources[name, key][0]
    return read


def _in_fp32(
    modules: Mapping[str, nn.Module], sources: Mapping[tuple[str, str], list[str]]
) -> set[str]:
    """Return the checkpoint names of the float32 parameters of layers that keep a state."""
    return {
        source
        for name, module in modules.items()
        if keeps_state(module)
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype == torch.float32
        for source in sources[name, key]
    }


def _refuse_shared_head(
    model: PreTrainedModel,
    architecture: str,
    tensors: Collection[str],
    sources: Mapping[tuple[str, str], list[str]],
) -> None:
    """Raise `NoEngineModelError` if vLLM shares the output head with the embedding and the model
    does not.

    tensors: names in a checkpoint. sources: what vLLM loads into each parameter.
    """
    head = model.get_output_embeddings()
    checkpoint_name = names_of(model.config).checkpoint_name
    names = (checkpoint_name(name) for name, module in model.named_modules() if module is head)
    weight = f"{next(names, '')}.weight"
    if weight in tensors and all(weight not in loaded for loaded in sources.values()):
        raise NoEngineModelError(
            f"vLLM's {architecture} takes the input embedding for its output head whatever"
            f" config.json says, and this model has another, {weight!r}; take a model whose"
            " tie_word_embeddings is true and whose head is its embedding"
        )


def _experts_of(
    name: str,
    sources: Mapping[tuple[str, str], list[str]],
) -> str:
    """Return the checkpoint's name of the experts in vLLM's runner `name`."""
    for (module, _), loaded in sources.items():
        before, between, _ = loaded[0].partition(".experts.")
        if between and module.startswith(f"{name}.routed_experts"):
            return f"{before}.experts"
    raise GraphError(
        f"vLLM loads no experts into {name!r} under the names they have in checkpoints here"
    )


def _device(model: PreTrainedModel) -> torch.device:
    """Return the device of the forward: the CPU for a model on the meta device.

    A model's operators can be built on the CPU, also without values.
    """
    return torch.device("cpu") if model.device.type == "meta" else model.device


def build_graph(
    model: PreTrainedModel,
    engine: EngineModel,
    quantization: dict[str, Any] | None,
    layers: Layers,
    context: LayerContext,
    log: RouterLog,
) -> Graph:
    """Return the engine's graph over `layers`, in the context's present dtype.

    Raises `GraphError` for a layer that vLLM leaves unquantized although the plan quantizes it.

    Args:
        model: the model of masters.
        engine: vLLM's modules for it.
        quantization: the checkpoint's `quantization_config`.
        layers: the model's low-bit layers and copies.
        context: settings and state that the layers share.
        log: receives the routers' logits.
    """
    checkpoint_name = names_of(model.config).checkpoint_name
    copies = {
        checkpoint_name(name): copy
        for name, copy in layers.copies.items()
        if name not in layers.frozen
    }
    buffers = {checkpoint_name(name): buffer for name, buffer in model.named_buffers()}
    buffers |= {checkpoint_name(name): layers.copies[name].read for name in layers.frozen}
    weights = {
        key: copies[source] for key, source in engine.loaded_from.items() if source in copies
    }
    embedding: Any = model.get_input_embeddings()
    name = next(n for n, parameter in model.named_parameters() if parameter is embedding.weight)
    weights.setdefault((engine.embedding, "weight"), layers.copies[name])
    skeleton = build_skeleton(
        model.config, engine.architecture, quantization, context.forward_dtype, _device(model)
    )
    masters = Masters(
        stacks=layers.stacks,
        experts={name: layers.experts[layer] for name, layer in engine.experts.items()},
        weights=weights,
        buffers={
            key: buffers[source] for key, source in engine.loaded_from.items() if source in buffers
        },
        padding=-1 if embedding.padding_idx is None else embedding.padding_idx,
    )
    return Graph(skeleton, masters, context, log)


def _checkpoint_tensors(
    model: PreTrainedModel, matrices: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """Return name → shape of an unquantized checkpoint's tensors.

    Args:
        model: the model of masters.
        matrices: checkpoint name → (O, I) of each linear layer.
    """
    checkpoint_name = names_of(model.config).checkpoint_name
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    state |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    stored_as_stacks = {
        checkpoint_name(name) for name, experts in fused_experts(model) if is_gpt_oss(experts)
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        layer = checkpoint_name(name.rpartition(".")[0])
        if len(shape) == 3 and layer.endswith(".experts") and layer not in stored_as_stacks:
            # a stack: the checkpoint has every expert's matrices
            tensors |= {
                f"{matrix}.weight": matrix_shape
                for matrix, matrix_shape in matrices.items()
                if matrix.startswith(f"{layer}.")
            }
        else:
            tensors[checkpoint_name(name)] = shape
    return tensors
