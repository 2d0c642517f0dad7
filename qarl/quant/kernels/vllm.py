"""Kernels of layers that vLLM builds, with the engine's classes and layout.

vLLM's linear layers get the scheme's own `quantization_config`, so vLLM resolves the scheme's class
and kernel from the text that it reads in a checkpoint. The low-bit tensors are loaded through the
loaders of the layer's parameters and post-processed by its quant method, as the engine does with a
checkpoint.

Axes: N tokens, O output rows, I input columns.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    KernelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.vllm_experts import VllmExperts, own_scratch, vllm_experts
from qarl.quant.kernels.vllm_gpu import load_plugins
from qarl.quant.kernels.vllm_layers import drop_loaders, kernel_name
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.runtime.batch_invariance import kernel_arguments
from qarl.quant.runtime.replaced import replaced
from qarl.quant.schemes import Scheme, write_quantization_config

_GROUPS = ("_TP", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP")
"""Names of vLLM's process groups in `parallel_state`."""
_ONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
_ALONE = SimpleNamespace(
    rank=0,
    rank_in_group=0,
    ranks=[0],
    world_size=1,
    is_first_rank=True,
    is_last_rank=True,
    device_group=_ONE,
    cpu_group=_ONE,
)
"""Stand-in for a process group of vLLM's with this process as its only member."""


class VllmMatmul:
    """One vLLM linear layer or output head, ready to multiply.

    It keeps every tensor alive that its kernel may point to.
    """

    def __init__(self, linear: LinearBase | VocabParallelEmbedding):
        self._linear: Any = linear
        self.name = kernel_name(linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x, compute dtype [N, I]; returns compute dtype [N, O].

        An output head returns more columns, because vLLM pads it.
        """
        with own_scratch(x.device):
            if isinstance(self._linear, GateLinear):  # Its forward chooses among several kernels.
                y = self._linear(x)
                return y[0] if isinstance(y, tuple) else y
            bias = getattr(self._linear, "bias", None)
            return self._linear.quant_method.apply(self._linear, x, bias)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x as ranks after the first multiply by a row-parallel layer: asking for no bias.

        A kernel that has packed the layer's bias into the weight adds it all the same.
        """
        return self._linear.quant_method.apply(self._linear, x, None)


class VllmFactory:
    """Factory of `VllmMatmul`s for one compute dtype.

    Its methods raise what vLLM raises if vLLM has no kernel for a scheme.
    """

    def __init__(self, dtype: torch.dtype):
        # The engine's processes load the same plugins; `quant.kernels.vllm_cpu` is one of them.
        load_plugins()
        self._dtype = dtype
        compilation = CompilationConfig(mode=CompilationMode.NONE)
        self._config = VllmConfig(
            compilation_config=compilation,
            kernel_config=KernelConfig(**kernel_arguments()),
        )
        # FP8 layers read the dtype, DeepGEMM and MoE kernels the type of model, MXFP4 experts the
        # quantization.
        model = PretrainedConfig()
        model_config = SimpleNamespace(
            dtype=dtype, hf_config=model, hf_text_config=model, quantization_config=None
        )
        self._config.model_config = model_config  # pyright: ignore[reportAttributeAccessIssue]
        self._schemes: dict[str, QuantizationConfig] = {}

    def linear(
        self,
        name: str,
        weights: Sequence[LowBitWeight],
        biases: Sequence[torch.Tensor | None],
        like: Any = None,
    ) -> VllmMatmul:
        """Return a layer's kernel; see `KernelFactory.linear`."""
        first = weights[0]
        rows = [weight.shape[0] for weight in weights]
        with self._loading(first.codes.device):
            linear = self._empty(
                name,
                rows,
                columns=first.shape[1],
                scheme=first.scheme,
                bias=biases[0] is not None,
                like=like,
            )
            for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                tensors = list(weight.tensors())
                if bias is not None:
                    tensors.append(("bias", bias.detach()))
                # Loaders of a merged layer also take the number of the part.
                part = (number,) if len(rows) > 1 else ()
                for key, tensor in tensors:
                    parameter = getattr(linear, key)
                    parameter.weight_loader(parameter, tensor, *part)
            assert linear.quant_method is not None
            linear.quant_method.process_weights_after_loading(linear)
        drop_loaders(linear)
        return VllmMatmul(linear)

    def _empty(
        self,
        name: str,
        rows: Sequence[int],
        columns: int,
        scheme: Scheme,
        bias: bool,
        like: Any = None,
    ) -> LinearBase:
        """Build vLLM's layer without loading anything. Call this within `_loading`.

        rows: output rows of each part. The other arguments are as in `linear`.
        """
        shared = {
            "bias": bias,
            "params_dtype": self._dtype if like is None else like.params_dtype,
            "quant_config": self._quant_config(scheme),
            "prefix": name,
            "return_bias": False,
            "disable_tp": True,
        }
        if isinstance(like, GateLinear):
            del shared["disable_tp"]
            return GateLinear(columns, rows[0], out_dtype=like.out_dtype, **shared)
        if len(rows) > 1:
            return MergedColumnParallelLinear(columns, list(rows), **shared)
        return ReplicatedLinear(columns, rows[0], **shared)

    def require_shape(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raise what vLLM raises if it has no kernel for a weight of this shape, (O, I).

        The layer is built on the meta device, so nothing is allocated.
        """
        rows, columns = shape
        with self._loading(torch.device("meta")):
            self._empty("a layer", [rows], columns, scheme, bias=False)

    def experts(
        self,
        layer: str,
        shape: ExpertsShape,
        weights: LowBitExperts,
        biases: Sequence[torch.Tensor] = (),
    ) -> VllmExperts:
        """Return a layer's experts; see `KernelFactory.experts`."""
        with self._loading(weights.device):
            quant_config = self._quant_config(weights.experts[0].down.scheme)
            return vllm_experts(layer, shape, weights, biases, self._config, quant_config)

    @contextlib.contextmanager
    def _loading(self, device: torch.device) -> Iterator[None]:
        """Set up what vLLM's layers read while a model loads.

        Their output dtype is torch's default dtype, which is the compute dtype in this context.
        """
        with (
            set_current_vllm_config(self._config),
            set_default_torch_dtype(self._dtype),
            alone(),
            device,
        ):
            yield

    def _quant_config(self, scheme: Scheme) -> QuantizationConfig | None:
        """Return vLLM's config of a scheme; None if nothing is quantized."""
        groups = [(scheme, ["Linear"])] if scheme.quantization else []
        written = write_quantization_config(groups, [])
        if written is None:
            return None
        if scheme.name not in self._schemes:
            config_class = get_quantization_config("compressed-tensors")
            self._schemes[scheme.name] = config_class.from_config(written)
        return self._schemes[scheme.name]


def alone() -> contextlib.AbstractContextManager[None]:
    """Set vLLM's process groups to those of a single process, for the duration of a context.

    Groups of an engine in this process are restored unchanged.
    """
    groups = {name: _ALONE for name in _GROUPS if hasattr(parallel_state, name)}
    return replaced(parallel_state, **groups)
