"""Products by the layer objects of the running engine itself: no second copy of a weight version,
no second kernel.

They multiply the version the engine holds; who shares them writes each version into the engine
first (`sync.publisher.Publisher.share_layers`).
"""

from collections.abc import Sequence
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
    """What a module of vLLM's computes by: its class, and of an operator the method chosen for this
    platform.
    """
    method = getattr(module, "_forward_method", None)
    # of a leaf in the learner's graph, what it calls
    method = getattr(method, "method", method)
    return (
        f"{type(module).__name__}{'' if method is None else '.' + getattr(method, '__name__', '?')}"
    )


class EngineLayers:
    """A `KernelFactory` over a loaded vLLM model: weights it is given are not read, the engine's
    layer of that name holds them. kinds: of all its modules, by name.

    Raises `KernelError` for a layer the engine does not have, or has a part of (tensor
    parallelism).
    """

    def __init__(self, model: nn.Module):
        """model: vLLM's, in this process."""
        self._layers: dict[str, Any] = {}
        self.kinds = {name: operator_kind(module) for name, module in model.named_modules()}
        for name, module in model.named_modules():
            if isinstance(module, LinearBase | VocabParallelEmbedding):
                self._layers[name] = module
            elif isinstance(module, RoutedExperts):
                self._layers[module.layer_name] = module

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> VllmMatmul:
        """See `KernelFactory.linear`."""
        module = self._layer(name)
        if module.tp_size != 1:
            raise KernelError(f"the engine holds one of {module.tp_size} parts of {name!r} here")
        return VllmMatmul(module)

    def experts(self, layer: str, shape: ExpertsShape, weights: LowBitExperts) -> VllmExperts:
        """See `KernelFactory.experts`."""
        module = self._layer(layer)
        if module.local_num_experts != shape.experts:
            raise KernelError(
                f"the engine holds {module.local_num_experts} of the {shape.experts} experts of"
                f" {layer!r}"
            )
        return VllmExperts(module)

    def _layer(self, name: str) -> Any:
        if name not in self._layers:
            raise KernelError(f"the engine has no layer {name!r} to share with the learner")
        return self._layers[name]
