"""Maps vLLM's modules to a checkpoint's layers, by tracing how vLLM loads the checkpoint.

vLLM's own names often differ: it stacks projections, and a family's loader may rename modules. Its
list of stacked projections (`packed_modules_mapping`) lacks those that a checkpoint has stacked
itself (GLM-4), and renamed modules.
"""

from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from qarl.quant.checkpoint.folder import tensor_shapes
from qarl.quant.graph.loading import trace_loading
from qarl.quant.graph.skeleton import skeleton_of
from qarl.quant.kernels.engine_layers import without_towers

_TRACED: WeakKeyDictionary[nn.Module, dict[str, list[str]]] = WeakKeyDictionary()
"""Model → module name → the checkpoint's layers that are loaded into the module."""
_MULTIPLIED: WeakKeyDictionary[nn.Module, dict[str, list[str]]] = WeakKeyDictionary()
"""Model → module name → those of them that the module multiplies, if it does.

A router may also hold a correction bias, which a checkpoint has in another module (ERNIE 4.5).
"""
_COPIED: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""Model → names of modules into whose parameters the model copies without vLLM's weight loaders."""
_OF_PRODUCTS = ("weight", "bias", "input_")
"""Beginnings of vLLM's names of parameters of products."""


def trace_names(model: nn.Module, config: VllmConfig) -> None:
    """Record which layers of its checkpoint folder each module of a model is loaded from.

    Takes 0.1 s the first time. Must not be called while the model computes, because it replaces
    vLLM's groups meanwhile.
    """
    if model in _TRACED:
        return
    served = config.model_config
    folder = Path(served.model)
    device = torch.device(current_platform.device_type)
    skeleton = skeleton_of(folder, served.architecture, served.dtype, device)
    traced = trace_loading(skeleton, tensor_shapes(folder), in_order=False)
    layers: dict[str, list[str]] = {}
    multiplied: dict[str, list[str]] = {}
    for (module, key), sources in traced.sources.items():
        names = [source.rpartition(".")[0] for source in sources]
        for by_module in (layers, multiplied) if key.startswith(_OF_PRODUCTS) else (layers,):
            earlier = by_module.get(module, [])
            by_module[module] = list(dict.fromkeys([*earlier, *names]))  # each once, in order
    _TRACED[model] = layers
    _COPIED[model] = sorted({module for module, _ in traced.copied})
    _MULTIPLIED[model] = {**layers, **multiplied}


def copied_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a traced model that copy what they load (attention's sinks of gpt-oss).

    Experts are not among them, because each has a weight loader that takes its own tensors.
    """
    modules = map(model.get_submodule, _COPIED[model])
    return [module for module in modules if not isinstance(module, RoutedExperts)]


def tower_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model's towers, which no publish reaches."""
    published = {module for _, module in without_towers(model)}
    return [module for module in model.modules() if module not in published]


def layer_names(model: nn.Module, name: str, module: nn.Module) -> list[str]:
    """Return the checkpoint names of the layers in a traced model's module.

    They are in the order of the module's rows. Returns the module's own name if nothing is loaded
    into it. A tied head is named as in the files, or without the name of the language model that it
    is a part of: vLLM has `language_model.lm_head` where checkpoints have `lm_head`.
    """
    if _tied_head(model, module):
        last = name.rpartition(".")[2]
        loaded = _MULTIPLIED[model].get(name, [])
        return [layer for layer in loaded if layer.rpartition(".")[2] == last] or [last]
    names = _MULTIPLIED[model].get(name, [name])
    if isinstance(module, RoutedExperts):
        # beside a correction bias, which is no expert's; a stack's tensor is the experts' own
        dotted = [f"{name}." for name in names]
        befores = [name.partition(".experts.")[0] for name in dotted if ".experts." in name]
        return [f"{befores[0]}.experts" if befores else module.layer_name]
    return names


def checkpoint_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the modules of a traced model that own parameters, and the checkpoint names of each.

    Experts are included, and modules that the checkpoint has buffers of. Tied heads are not,
    because they own no parameters, nor are layers of latent attention, which are made from other
    layers' parameters.
    """
    names = {}
    for name, module in without_towers(model):
        owns_parameters = any(True for _ in module.parameters(recurse=False))
        is_loaded = owns_parameters or name in _TRACED[model]
        if not is_loaded and not isinstance(module, RoutedExperts):
            continue
        if is_deferred_attention_layer(module) or _tied_head(model, module):
            continue
        names[module] = _TRACED[model].get(name, [name])
    return names


def _tied_head(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a module is an output head whose weight is an embedding's.

    The weights decide, as in vLLM's loader: a checkpoint may have a head of its own although its
    config.json says tie_word_embeddings, or an equal one.
    """
    return isinstance(module, ParallelLMHead) and any(
        isinstance(other, VocabParallelEmbedding)
        and not isinstance(other, ParallelLMHead)
        and getattr(other, "weight", None) is getattr(module, "weight", module)
        for other in model.modules()
    )
