"""Products by the layer objects of the running engine.

There is no second copy of a weight version and no second kernel. The layers multiply the version
that the engine holds, so a learner that shares them must write each version into the engine first
(`sync.publisher.Publisher.share_layers`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.base import KernelError
from qarl.quant.kernels.vllm import VllmMatmul
from qarl.quant.kernels.vllm_experts import VllmExperts
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts


def operator_kind(module: nn.Module) -> str:
    """Return the class of a vLLM module; for an operator, also the method chosen for this platform.

    The method's name follows the class after a dot.
    """
    method = getattr(module, "_forward_method", None)
    # A leaf in the learner's graph wraps the method that it calls.
    method = getattr(method, "method", method)
    name = type(module).__name__
    return name if method is None else f"{name}.{getattr(method, '__name__', '?')}"


def without_towers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of vLLM's model, without its parts for pictures or sound.

    They are frozen, and no other part of the code has layers for them. Nor has it for the model as
    a module, whose own parameters belong to such a part (LLaVA-NeXT's `image_newline`).

    vLLM's mapping says which modules these parts are, or, where a class has none (LLaVA-OneVision,
    Cohere 2 Vision), the names that it marked as a tower's when it built them. The checkpoint's
    names cannot, because a worker of an engine knows vLLM's names alone. The mapping has modules
    only, and says nothing of the model's own parameters. No model is known in which one of them is
    the language model's.
    """
    mapping = model.get_mm_mapping() if hasattr(model, "get_mm_mapping") else None  # type: ignore[operator]
    marked = getattr(model, "_tower_model_names", ())
    parts = marked if mapping is None else (*mapping.tower_model, *mapping.connector)
    parts = tuple(part.rstrip(".") for part in parts)  # vLLM's Qwens write "visual."
    if mapping is not None and not mapping.tower_model:
        # no list has what embeds patches without an encoder (Gemma 4's unified class), nor what
        # vLLM's general class for models with pictures or sound has beside the language model
        own_names = [part.rstrip(".") for part in mapping.language_model]
        parents = dict.fromkeys(name.rpartition(".")[0] for name in own_names)
        beside = (
            f"{parent}.{name}".lstrip(".")
            for parent in parents
            for name, _ in model.get_submodule(parent).named_children()
        )
        parts += tuple(name for name in beside if name not in own_names)
    is_whole = mapping is not None or bool(getattr(model, "supports_multimodal", False))
    for name, module in model.named_modules():
        is_own = is_whole and not name
        if not is_own and not any(name == part or name.startswith(f"{part}.") for part in parts):
            yield name, module


class EngineLayers:
    """A `KernelFactory` over a loaded vLLM model.

    Its methods do not read the weights they get, because the engine's layer of that name holds
    them. They raise `KernelError` for a layer that the engine does not have, or of which it has
    only a part (tensor parallelism).
    """

    def __init__(self, model: nn.Module):
        """Index the layers of vLLM's model, which is in this process."""
        self._layers: dict[str, Any] = {}
        self.kinds = {name: operator_kind(module) for name, module in without_towers(model)}
        """`operator_kind` of every module outside of towers, by name."""
        for name, module in without_towers(model):
            if isinstance(module, LinearBase | VocabParallelEmbedding):
                self._layers[name] = module
            elif isinstance(module, RoutedExperts):
                self._layers[module.layer_name] = module
                # MiniMax-M2's layers call themselves by another name than their module's
                self._layers[name.removesuffix(".routed_experts")] = module

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> VllmMatmul:
        """Return the engine's layer; see `KernelFactory.linear`."""
        module = self._layer(name)
        if module.tp_size != 1:
            raise KernelError(f"the engine holds one of {module.tp_size} parts of {name!r} here")
        return VllmMatmul(module)

    def experts(
        self,
        layer: str,
        shape: ExpertsShape,
        weights: LowBitExperts,
        biases: Sequence[torch.Tensor] = (),
    ) -> VllmExperts:
        """Return the engine's experts; see `KernelFactory.experts`."""
        module = self._layer(layer)
        if module.local_num_experts != shape.experts:
            raise KernelError(
                f"the engine holds {module.local_num_experts} of the {shape.experts} experts of"
                f" {layer!r}"
            )
        return VllmExperts(module)

    def _layer(self, name: str) -> Any:
        """Return the engine's layer of that name."""
        if name not in self._layers:
            raise KernelError(f"the engine has no layer {name!r} to share with the learner")
        return self._layers[name]
