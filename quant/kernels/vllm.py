"""Products by the very layer vLLM builds: the same classes, kernel selection and weight layout as in the engine.

vLLM's `ReplicatedLinear` is given the scheme's own `quantization_config`, so vLLM resolves scheme class and
kernel from the same text it reads in a checkpoint. The layer is loaded with the low-bit tensors through its
parameters' loaders and post-processed by its quant method: what the engine does with a checkpoint.

Axes: N tokens, O output rows, I input columns.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from quant.kernels.describe import kernel_name
from quant.materialize import LowBitWeight
from quant.schemes import Scheme


class VllmProduct:
    """One vLLM linear layer, ready to multiply. Keeps every tensor its kernel may point to alive."""

    def __init__(self, linear: ReplicatedLinear):
        self._linear = linear
        self.name = kernel_name(linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: compute dtype [N, I] → compute dtype [N, O]."""
        return self._linear(x)


class VllmProductFactory:
    """Builds `VllmProduct`s for one compute dtype. Raises what vLLM raises where it has no kernel for a scheme."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
        # vLLM's FP8 layer asks the model config for the activation dtype and for nothing else.
        self._config.model_config = SimpleNamespace(dtype=dtype)  # pyright: ignore[reportAttributeAccessIssue]
        self._schemes: dict[str, CompressedTensorsConfig] = {}

    def __call__(self, layer: str, weight: LowBitWeight, bias: torch.Tensor | None) -> VllmProduct:
        """See `ProductFactory`."""
        device = weight.codes.device
        with set_current_vllm_config(self._config), _default_dtype(self._dtype), _single_rank(), device:
            linear = ReplicatedLinear(
                weight.shape[1],
                weight.shape[0],
                bias=bias is not None,
                params_dtype=self._dtype,
                quant_config=self._quant_config(weight.scheme),
                prefix=layer,
                return_bias=False,
                disable_tp=True,
            )
            for name, tensor in weight.tensors():
                parameter = getattr(linear, name)
                parameter.weight_loader(parameter, tensor)
            if bias is not None:
                linear.bias.weight_loader(linear.bias, bias.detach())  # pyright: ignore[reportAttributeAccessIssue]
            linear.quant_method.process_weights_after_loading(linear)
        # Parameters point back at their layer through their loaders: a cycle that would keep each weight version's
        # tensors until Python's collector comes by.
        for parameter in linear.parameters():
            if hasattr(parameter, "weight_loader"):
                del parameter.weight_loader  # pyright: ignore[reportAttributeAccessIssue]
        return VllmProduct(linear)

    def _quant_config(self, scheme: Scheme) -> CompressedTensorsConfig | None:
        written = scheme.quantization_config([])
        if written is None:
            return None
        if scheme.name not in self._schemes:
            self._schemes[scheme.name] = CompressedTensorsConfig.from_config(written)
        return self._schemes[scheme.name]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """vLLM layers take their output dtype from torch's default dtype while a model loads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _single_rank() -> Iterator[None]:
    """A tensor-parallel group of one while a layer is built: the learner's layers hold whole weights.

    vLLM parameters ask for the group even in layers with tensor parallelism off; where an engine in this
    process has set one up it is put back unchanged.
    """
    before = parallel_state._TP
    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        parallel_state._TP = before
