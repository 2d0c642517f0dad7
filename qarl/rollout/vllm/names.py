"""What checkpoints call the layers of vLLM's modules: by what its own loading does with a
checkpoint's names.

vLLM's names are often others: stacked projections, and modules that a family's loader renames. Its
list of stacked projections (`packed_modules_mapping`) is not of what a checkpoint has stacked
itself (GLM-4), nor of renamed ones.
"""

from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from qarl.quant.checkpoint.folder import tensor_shapes
from qarl.quant.graph.loading import trace_loading
from qarl.quant.graph.skeleton import skeleton_of

_TRACED: WeakKeyDictionary[nn.Module, dict[str, list[str]]] = WeakKeyDictionary()


def trace_names(model: nn.Module, config: VllmConfig) -> None:
    """Remember which layers of its checkpoint folder a model's modules are loaded from; 0.1 s the
    first time.

    Not while the model computes: vLLM's groups are others meanwhile.
    """
    if model in _TRACED:
        return
    served, folder = config.model_config, Path(config.model_config.model)
    device = torch.device(current_platform.device_type)
    skeleton = skeleton_of(folder, served.architecture, served.dtype, device)
    layers: dict[str, list[str]] = {}
    for (module, _), sources in trace_loading(
        skeleton, tensor_shapes(folder), in_order=False
    ).items():
        names = [source.rpartition(".")[0] for source in sources]
        layers[module] = list(dict.fromkeys([*layers.get(module, []), *names]))
    _TRACED[model] = layers


def layer_names(model: nn.Module, name: str, module: nn.Module) -> list[str]:
    """Checkpoint names of the layers in one of a traced model's modules, in the order of its rows;
    its own name where nothing is loaded into it, as of a tied head.
    """
    names = [name] if _tied_head(model, module) else _TRACED[model].get(name, [name])
    if isinstance(module, RoutedExperts):
        before, between, _ = names[0].partition(".experts.")
        return [f"{before}.experts" if between else module.layer_name]
    return names


def checkpoint_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module of a traced model that owns parameters, and experts, with checkpoint names of
    the layers in it; without tied heads, which have none of their own, and layers of latent
    attention, made from other layers'.
    """
    return {
        module: _TRACED[model].get(name, [name])
        for name, module in model.named_modules()
        if (
            isinstance(module, RoutedExperts) or any(True for _ in module.parameters(recurse=False))
        )
        and not is_deferred_attention_layer(module)
        and not _tied_head(model, module)
    }


def _tied_head(model: nn.Module, module: nn.Module) -> bool:
    return isinstance(module, ParallelLMHead) and getattr(
        model.config, "tie_word_embeddings", False
    )
