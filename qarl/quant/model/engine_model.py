"""From a model of masters to the engine's graph over them: what vLLM makes of each parameter.

A parameter's name in a checkpoint says which of vLLM's modules takes it (`quant.graph.loading`).
Linear layers there are low-bit layers here, also where transformers has a module of its own
(routers); everything else is a copy.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from qarl.configs.errors import GraphError
from qarl.quant.checkpoint.families import family_of
from qarl.quant.graph.graph import Graph, Masters
from qarl.quant.graph.kinds import refuse_unknown
from qarl.quant.graph.loading import trace_loading
from qarl.quant.graph.router_log import RouterLog
from qarl.quant.graph.skeleton import build_skeleton
from qarl.quant.layers.context import LayerContext
from qarl.quant.model.layers import EngineModel, Layers
from qarl.quant.runtime.shards import whole_shape


def engine_model(
    model: PreTrainedModel, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> EngineModel:
    """Ask vLLM. tensors: name → shape of a checkpoint of this model. Raises `GraphError` where it
    has no such model.
    """
    architecture = type(model).__name__
    skeleton = build_skeleton(model.config, architecture, None, dtype, _device(model))
    sources = trace_loading(skeleton, tensors)
    steering: list[Any] = []
    stacked, unusual, experts, read, heads, embeddings = {}, {}, {}, {}, [], []
    modules = dict(skeleton.module.named_modules())
    for name, module in modules.items():
        refuse_unknown(name, module, sources)
        if isinstance(module, LinearBase):
            if module.params_dtype != dtype or isinstance(module, GateLinear):
                unusual[name] = module
            stacked[name] = tuple(
                source.removesuffix(".weight") for source in sources.get((name, "weight"), ())
            )
        elif isinstance(module, ParallelLMHead):
            heads.append(name)
        elif isinstance(module, VocabParallelEmbedding):
            embeddings.append(name)
        elif isinstance(module, MoERunner):
            experts[name] = _experts_of(name, sources)
            steering.append(getattr(module.router, "e_score_correction_bias", None))
        multiplied = ("weight", "bias") if isinstance(module, LinearBase | ParallelLMHead) else ()
        for key in {*module._parameters, *module._buffers} - {*multiplied}:
            if len(sources.get((name, key), ())) == 1:
                read[name, key] = sources[name, key][0]
    biases = {id(bias) for bias in steering if bias is not None}
    steered = [
        (n, key)
        for n, module in modules.items()
        for key, p in module._parameters.items()
        if id(p) in biases
    ]
    return EngineModel(
        architecture=architecture,
        steering=tuple(source for key in steered for source in sources.get(key, ())),
        unusual=unusual,
        stacked=stacked,
        experts=experts,
        read=read,
        heads=tuple(heads or embeddings[:1]),
        embedding=embeddings[0] if embeddings else "",
    )


def _experts_of(name: str, sources: Mapping[tuple[str, str], list[str]]) -> str:
    """The checkpoint's name of the experts in vLLM's runner `name`."""
    for (module, _), loaded in sources.items():
        before, between, _ = loaded[0].partition(".experts.")
        if between and module.startswith(f"{name}.routed_experts"):
            return f"{before}.experts"
    raise GraphError(
        f"vLLM loads no experts into {name!r} under the names they have in checkpoints here"
    )


def _device(model: PreTrainedModel) -> torch.device:
    """Where the forward runs; of a model without values, where its operators can be made."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def build_graph(
    model: PreTrainedModel,
    engine: EngineModel,
    quantization: dict[str, Any] | None,
    layers: Layers,
    context: LayerContext,
    log: RouterLog,
) -> Graph:
    """The graph in the context's present dtype. quantization: the checkpoint's
    `quantization_config`. layers: of the model. Raises `GraphError` for a layer that vLLM leaves
    unquantized and the plan does not.
    """
    named = family_of(model.config.model_type).checkpoint_name
    copies = {
        named(name): copy for name, copy in layers.copies.items() if name not in layers.frozen
    }
    buffers = {named(name): buffer for name, buffer in model.named_buffers()}
    buffers |= {named(name): layers.copies[name].read for name in layers.frozen}
    weights = {key: copies[source] for key, source in engine.read.items() if source in copies}
    embedding: Any = model.get_input_embeddings()
    name = next(n for n, parameter in model.named_parameters() if parameter is embedding.weight)
    weights.setdefault((engine.embedding, "weight"), layers.copies[name])
    return Graph(
        build_skeleton(
            model.config,
            engine.architecture,
            quantization,
            context.forward_dtype,
            _device(model),
        ),
        Masters(
            stacks=layers.stacks,
            experts={name: layers.experts[layer] for name, layer in engine.experts.items()},
            weights=weights,
            buffers={
                key: buffers[source] for key, source in engine.read.items() if source in buffers
            },
            padding=-1 if embedding.padding_idx is None else embedding.padding_idx,
        ),
        context,
        log,
    )


def checkpoint_tensors(
    model: PreTrainedModel, matrices: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """Name → shape of an unquantized checkpoint's tensors. matrices:
    `quant.checkpoint.shapes.weight_shapes`.
    """
    named = family_of(model.config.model_type).checkpoint_name
    state = dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n in model.state_dict()
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        shape = tuple(whole_shape(tensor))
        layer = named(name.rpartition(".")[0])
        if len(shape) == 3 and layer.endswith(".experts"):
            tensors |= {
                f"{n}.weight": of_one for n, of_one in matrices.items() if n.startswith(f"{layer}.")
            }
        else:
            tensors[named(name)] = shape
    return tensors
