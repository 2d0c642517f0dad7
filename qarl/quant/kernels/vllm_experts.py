"""Routed experts by the very module vLLM builds: fused kernels where vLLM has them, QaRL's plugin
where it has none.

As `quant.kernels.vllm` for dense layers: vLLM's `RoutedExperts` gets the scheme's own
`quantization_config`, takes the low-bit tensors by their checkpoint names through its own loader,
and post-processes them.

Axes: N tokens, K experts a token, E experts, H hidden columns, I expert columns.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

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

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """See `ExpertsMatmul`."""
        index = index.to(self._experts.quant_method.topk_indices_dtype or torch.int32)
        with engine_step(x.device, len(x)):
            y = self._experts.forward_modular(
                x.contiguous(), weights.contiguous(), index.contiguous()
            )
        # vLLM defers the sum over experts only where that was asked for
        assert isinstance(y, torch.Tensor)
        return y


def vllm_experts(
    layer: str,
    shape: ExpertsShape,
    weights: LowBitExperts,
    config: VllmConfig,
    quant_config: QuantizationConfig | None,
) -> VllmExperts:
    """Build and fill vLLM's module. To be called with `config` current and the compute dtype as
    torch's default.
    """
    experts = empty_experts(layer, shape, weights.device, config, quant_config)
    for _ in experts.load_weights(weights.tensors(shape.layout)):
        pass  # the loader is a generator: it loads as it is read
    experts.quant_method.process_weights_after_loading(experts)
    drop_loaders(experts)
    return VllmExperts(experts)


def empty_experts(
    layer: str,
    shape: ExpertsShape,
    device: torch.device,
    config: VllmConfig,
    quant_config: QuantizationConfig | None,
) -> RoutedExperts:
    """vLLM's module, with its kernel chosen and nothing loaded. To be called as `vllm_experts`."""
    dtype, layout = torch.get_default_dtype(), shape.layout
    moe = FusedMoEConfig(
        num_experts=shape.experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden,
        intermediate_size=shape.intermediate,
        num_local_experts=shape.experts,
        num_logical_experts=shape.experts,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
        activation=MoEActivation.from_str(shape.activation),
        device=device,
        routing_method=get_routing_method_type("softmax", shape.top_k, True, None, False),
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
    )
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
        ckpt_gate_proj_name=layout.gate,
        ckpt_down_proj_name=layout.down,
        ckpt_up_proj_name=layout.up,
    )


@contextmanager
def engine_step(device: torch.device, tokens: int) -> Iterator[None]:
    """Within this context vLLM's fused experts find what they would in its engine's step over so
    many tokens: scratch memory, and the context of the step's forward. Nothing on CPUs, whose
    experts take neither.
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
    """Within this context vLLM's kernels take scratch memory and locks from the learner's manager,
    and stay on torch's current stream. Nothing on CPUs.

    The engine's manager is locked once it has warmed up, at the size of its own batches, and CUDA
    graphs hold its addresses. In a thread where vLLM has set no stream, as autograd's, it would
    change to a new one, which what autograd runs next does not wait for.
    """
    if current_platform.is_cpu():
        yield
        return
    on_stream = replaced(torch_utils._current_stream_tls, value=torch.cuda.current_stream(device))
    with on_stream, replaced(workspace, _manager=_scratch(device)):
        yield


@functools.cache
def _scratch(device: torch.device) -> workspace.WorkspaceManager:
    """Grows to the largest batch and stays: the next layer takes the same."""
    return workspace.WorkspaceManager(device)


@functools.cache
def uncompiled_config() -> VllmConfig:
    """Of an engine without Inductor, for what vLLM runs outside of one."""
    return VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
