"""Routed experts by the module that vLLM builds.

It multiplies with vLLM's fused kernels, or with QaRL's plugin if vLLM has none. As with dense
layers (`quant.kernels.vllm`), vLLM's `RoutedExperts` gets the scheme's own `quantization_config`,
loads the low-bit tensors by their checkpoint names through its own loader, and post-processes them.

Axes: N tokens, K experts a token, E experts, H hidden columns, I expert columns.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    get_routing_method_type,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform
from vllm.utils import torch_utils
from vllm.v1.worker import workspace

from qarl.quant.checkpoint.families import ExpertsShape
from qarl.quant.kernels.vllm_layers import drop_loaders, kernel_name
from qarl.quant.materialize.experts import LowBitExperts
from qarl.quant.runtime.replaced import replaced


class VllmExperts:
    """One layer's experts, ready to multiply."""

    def __init__(self, experts: RoutedExperts):
        self._experts = experts
        self.name = kernel_name(experts)
        assert not experts.quant_method.is_monolithic, (
            f"{self.name} routes tokens itself, without a gradient for it"
        )

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts; see `ExpertsMatmul`."""
        index = index.to(self._experts.quant_method.topk_indices_dtype or torch.int32)
        with engine_step(x.device, len(x)):
            y = self._experts.forward_modular(
                x.contiguous(), weights.contiguous(), index.contiguous()
            )
        # vLLM leaves the sum over experts to the caller only if its config asks for that.
        assert isinstance(y, torch.Tensor)
        return y


def vllm_experts(
    layer: str,
    shape: ExpertsShape,
    weights: LowBitExperts,
    biases: Sequence[torch.Tensor],
    config: VllmConfig,
    quant_config: QuantizationConfig | None,
) -> VllmExperts:
    """Build vLLM's module and load the weights.

    Call this with `config` as vLLM's current config and the compute dtype as torch's default.
    """
    experts = empty_experts(layer, shape, weights.device, config, quant_config)
    if shape.biased:
        _copy_gpt_oss(experts, shape, weights, biases)
    else:
        for _ in experts.load_weights(weights.tensors(shape.layout)):
            pass  # The loader is a generator, which loads while it is read.
    experts.quant_method.process_weights_after_loading(experts)
    drop_loaders(experts)
    return VllmExperts(experts)


def _copy_gpt_oss(
    experts: Any, shape: ExpertsShape, weights: LowBitExperts, biases: Sequence[torch.Tensor]
) -> None:
    """Copy experts with biases into vLLM's module, as gpt-oss's own loader does.

    Rows of gate and up alternate there, too.
    """
    for prefix, bias in zip(("w13", "w2"), biases, strict=True):
        getattr(experts, f"{prefix}_bias").data.copy_(bias)
    for name, tensor in weights.tensors(shape.layout):
        number, _, own_name = name.partition(".")
        target = getattr(experts, own_name).data[int(number)]
        target.copy_(tensor.reshape(target.shape))


def empty_experts(
    layer: str,
    shape: ExpertsShape,
    device: torch.device,
    config: VllmConfig,
    quant_config: QuantizationConfig | None,
) -> RoutedExperts:
    """Build vLLM's module with its kernel chosen and nothing loaded.

    Call this in the same context as `vllm_experts`.
    """
    dtype = torch.get_default_dtype()
    layout = shape.layout
    activation = MoEActivation.from_str(shape.activation)
    moe = FusedMoEConfig(
        num_experts=shape.experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.intermediate,
        num_local_experts=shape.experts,
        num_logical_experts=shape.experts,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
        activation=activation if layout.gated else activation.without_mul(),
        device=device,
        has_bias=shape.biased,
        routing_method=get_routing_method_type("softmax", shape.top_k, True, None, False),
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
    )
    # Stand-in for vLLM's manager of experts: all of them are in this process.
    local = SimpleNamespace(
        local_num_experts=shape.experts,
        placement_strategy="linear",
        expert_map=None,
        expert_mask=None,
        routing_tables=None,
        num_fused_shared_experts=0,
        map_global_to_local=lambda expert: expert,
    )
    return RoutedExperts(
        layer,
        dtype,
        moe,
        quant_config,
        expert_map_manager=local,  # pyright: ignore[reportArgumentType]
        # vLLM calls the first matrix without a gate so
        ckpt_gate_proj_name=layout.gate if layout.gated else layout.up,
        ckpt_down_proj_name=layout.down,
        ckpt_up_proj_name=layout.up if layout.gated else None,
    )


@contextmanager
def engine_step(device: torch.device, tokens: int) -> Iterator[None]:
    """Set up what vLLM's fused experts read in a step of its engine over that many tokens.

    That is scratch memory and the step's forward context. Does nothing on CPUs, whose experts use
    neither.
    """
    if current_platform.is_cpu():
        yield
        return
    with (
        own_scratch(device),
        set_forward_context(None, uncompiled_config(), num_tokens=tokens),
    ):
        yield


@contextmanager
def own_scratch(device: torch.device) -> Iterator[None]:
    """Give vLLM's kernels the learner's scratch memory and locks, and torch's current stream.

    Does nothing on CPUs. The engine's own manager of scratch memory is locked after its warm-up, at
    the size of the engine's batches, and CUDA graphs hold its addresses. In a thread where vLLM has
    set no stream, such as autograd's, vLLM would change to a new stream, and what autograd runs
    next would not wait for it.
    """
    if current_platform.is_cpu():
        yield
        return
    on_stream = replaced(torch_utils._current_stream_tls, value=torch.cuda.current_stream(device))
    with on_stream, replaced(workspace, _manager=_scratch(device)):
        yield


@functools.cache
def _scratch(device: torch.device) -> workspace.WorkspaceManager:
    """Return the learner's scratch memory.

    It grows to the largest batch and is not freed, because the next layer uses it again.
    """
    return workspace.WorkspaceManager(device)


@functools.cache
def uncompiled_config() -> VllmConfig:
    """Return the config of an engine without Inductor, for vLLM's code outside an engine."""
    return VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
