"""Refusal of vLLM's modules for which the graph has no leaf, before anything is built on them.

A module is judged by its class and by what is loaded into it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from qarl.configs.errors import GraphError
from qarl.quant.checkpoint.families import SWIGLUOAI


def refuse_unknown(
    name: str,
    module: Any,
    sources: Mapping[tuple[str, str], Collection[str]],
) -> None:
    """Raise `GraphError` for a module of vLLM's for which the learner has no gradient.

    sources: what is loaded into each parameter (`quant.graph.loading`).
    """
    needed = _needed(name, module, sources)
    if needed:
        raise GraphError(
            f"the engine's model has a {type(module).__name__} at {name!r}, which the learner has"
            f" no gradient for: needed is {needed}; set learner.operators to 'transformers', or"
            " take another model"
        )


def undivided(name: str, module: Any) -> str:
    """Return why the learner cannot compute this module as the ranks of a tensor-parallel engine
    do, in words with its name; "" if it can.
    """
    if isinstance(module, MoERunner) and (
        module._shared_experts is not None
        or module.routed_scaling_factor != 1.0
        or module.routed_output_transform is not None
    ):
        reason = "has shared experts, or scales its sum, before its ranks are summed"
    elif isinstance(module, MoERunner) and module.moe_config.has_bias:
        reason = "has experts with biases, which each rank would add"
    elif isinstance(module, MoERunner) and not module.moe_config.is_act_and_mul:
        reason = "has experts without a gate, which ranks divide otherwise"
    elif isinstance(module, MLAAttention):
        reason = "is latent attention, whose heads ranks divide"
    elif isinstance(module, AttentionLayerBase) and not isinstance(module, Attention):
        reason = "is a layer with a state, which ranks divide"
    elif isinstance(module, RowParallelLinear) and not module.reduce_results:
        reason = "is a product that ranks sum together with another"
    elif isinstance(module, MiniMaxText01RMSNormTP):
        reason = "is a norm of which each rank has a part"
    else:
        return ""
    return f"{name!r} {reason}"


def is_delta_net(module: Any) -> bool:
    """Return whether this is a gated delta net that computes by vLLM's kernels for CPUs."""
    method = getattr(module, "_forward_method", None)
    return (
        isinstance(module, GatedDeltaNetAttention)
        and getattr(method, "__name__", "") == "forward_cpu"
    )


def is_short_convolution(module: Any) -> bool:
    """Return whether this is a short convolution (LFM2) by vLLM's kernels for CPUs."""
    return isinstance(module, ShortConv) and current_platform.is_cpu()


def is_mamba2(module: Any) -> bool:
    """Return whether this is a Mamba-2 layer that computes by vLLM's kernels for CPUs."""
    return isinstance(module, MambaMixer2) and current_platform.is_cpu()


def is_latent_attention(module: Any) -> bool:
    """Return whether this is latent attention that computes by vLLM's kernel for CPUs."""
    return isinstance(module, MLAAttention) and current_platform.is_cpu()


def keeps_state(module: Any) -> bool:
    """Return whether this has a leaf that computes a prompt otherwise than sampled tokens."""
    return is_delta_net(module) or is_short_convolution(module) or is_mamba2(module)


def is_convolution(module: Any) -> bool:
    """Return whether this is a convolution, which vLLM holds as a linear layer of a 3-D weight."""
    weight = getattr(module, "weight", None)  # quantized layers have none of this name
    return isinstance(module, LinearBase) and weight is not None and weight.ndim == 3


def _needed(
    name: str,
    module: Any,
    sources: Mapping[tuple[str, str], Collection[str]],
) -> str:
    """Return what the learner lacks for this module; "" if nothing."""
    if isinstance(module, LinearBase):
        if not sources.get((name, "weight")):
            return "a weight of the checkpoint that is loaded into it"
        adds_bias_itself = module.skip_bias_add and sources.get((name, "bias"))
        return (
            "a product without its bias, which the model adds by itself" if adds_bias_itself else ""
        )
    if isinstance(module, Attention):
        causal = (
            module.attn_type == AttentionType.DECODER and module.head_size_v == module.head_size
        )
        return "" if causal else "causal attention of keys and values of one size"
    if keeps_state(module) or is_latent_attention(module):
        return _of_parameters(name, module, sources)
    if isinstance(module, AttentionLayerBase):
        return "a leaf with this attention's values in decoding and its gradient"
    if isinstance(module, MoERunner):
        return _of_experts(module)
    if type(module).__name__ == "Gemma3nAltUp":
        return "a sum that leaves its inputs unchanged, as autograd needs (vLLM's is in place)"
    if isinstance(module, RoutedExperts | VocabParallelEmbedding):
        return ""
    return _of_parameters(name, module, sources)


def _of_experts(runner: Any) -> str:
    """Return what the learner lacks for the experts of a runner; "" if nothing."""
    experts = runner.routed_experts
    config = runner.moe_config
    reasons = {
        "experts with biases": config.has_bias and config.activation.value != SWIGLUOAI,
        "a gate with a limit or a slope": (
            config.swiglu_limit is not None or config.swiglu_alpha is not None
        ),
        "weights of experts applied to inputs": experts.apply_router_weight_on_input,
        "a router fused with the gate of shared experts": runner._fse_fuse_gate,
        "experts without a gate on this device": (
            not config.is_act_and_mul and not current_platform.is_cpu()
        ),
        "a router by the root of a softplus": (
            getattr(runner.router, "scoring_func", "softmax") == "sqrtsoftplus"
        ),
    }
    return " and ".join(reason for reason, is_so in reasons.items() if is_so)


def _of_parameters(
    name: str, module: nn.Module, sources: Mapping[tuple[str, str], Collection[str]]
) -> str:
    """Return what the learner lacks for a module whose own parameters are read as tensors."""
    for key, parameter in module._parameters.items():
        if parameter is not None and len(sources.get((name, key), ())) != 1:
            return f"one tensor of the checkpoint that is loaded into its {key!r}"
    return ""
