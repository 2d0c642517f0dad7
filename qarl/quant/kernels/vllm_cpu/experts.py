"""Mixtures of experts on CPUs that are quantized, or have no gate.

vLLM 0.32 has no quantized ones for CPUs without AMX ("No WNA16 MoE backend…"). With AMX it
multiplies int4 weights with int8 activations, even if the checkpoint says otherwise, and has no
W4A8 and FP8 experts. Experts without a gate (Nemotron-H) it refuses on every CPU, whatever their
scheme.

Each expert's two products go through the dense layer that vLLM itself builds for the scheme: gate
and up projection merged into one, then the gated activation, then the down projection. gpt-oss's
have biases, which these layers add; its gate is computed in fp32 and rounded once.

Quantized experts are registered as the `compressed-tensors` config, whose other layers keep vLLM's
methods. Remove it when vLLM's own method selection (`CompressedTensorsMoEMethod.get_moe_method`)
finds a backend on every CPU that treats activations as the scheme says. Unquantized experts without
a gate are those of a class that takes the place of vLLM's `RoutedExperts`. Remove it, with
`take_experts_without_gate`, when vLLM has a kernel for them on CPUs.

Axes: N tokens, K experts a token, E experts, H hidden columns, I expert columns.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import (
    FusedMoEConfig,
    FusedMoEMethodBase,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.quant.checkpoint.families import SWIGLUOAI
from qarl.quant.kernels.experts_loop import sum_over_experts
from qarl.quant.kernels.gates import gate_of
from qarl.quant.kernels.vllm_layers import drop_loaders

_PREFIXES = {"w13": ("w1", "w3"), "w2": ("w2",)}
"""vLLM's name of each of an expert's matrices → vLLM's names of the shards stacked in it.

The first matrix has gate and up, the second down. Without a gate the first has "w1" alone.
gpt-oss's loader takes each as a whole.
"""


_SHAPE = "weight_shape"
"""Name of the tensor with a packed matrix's own sizes."""
_gated = gate_of(SWIGLUOAI)


class PerExpertConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors config with `PerExpertMethod` for quantized experts, and for
    unquantized ones without a gate.
    """

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of one layer (vLLM's hook)."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        projections = (
            layer.ckpt_gate_proj_name,
            layer.ckpt_up_proj_name,
            layer.ckpt_down_proj_name,
        )
        schemes = [
            self.get_scheme_dict(layer, f"{prefix}.0.{projection}")
            for projection in projections
            if projection is not None
        ]
        if any(scheme != schemes[0] for scheme in schemes):
            raise ValueError(
                f"{prefix}: all projections of a layer's experts need one scheme, found {schemes}"
            )
        if schemes[0] is None:
            return _unquantized(layer, prefix) or UnquantizedFusedMoEMethod(layer.moe_config)
        weights: Any = schemes[0]["weights"]
        return PerExpertMethod(self, layer, prefix, weights.type == "float")


class PerExpertRoutedExperts(RoutedExperts):
    """vLLM's module of experts with `PerExpertMethod` for those without a gate in a model that is
    not quantized.
    """

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        """Return the method of these experts (vLLM's hook)."""
        own = _unquantized(self, prefix) if quant_config is None else None
        return own or super()._get_quant_method(prefix, quant_config, moe_config)


def take_experts_without_gate() -> None:
    """Make vLLM build experts without a gate on CPUs, which its configuration refuses; idempotent.

    This applies to layers that are built afterwards.
    """
    settle = FusedMoEConfig.__post_init__
    if hasattr(settle, "__wrapped__"):
        return

    @functools.wraps(settle)
    def settle_on_cpus(self: FusedMoEConfig) -> None:
        try:
            settle(self)
        except NotImplementedError:  # its last statement
            if self.is_act_and_mul:
                raise

    FusedMoEConfig.__post_init__ = settle_on_cpus  # type: ignore[method-assign]
    if RoutedExperts.__name__ not in op_registry_oot:
        RoutedExperts.register_oot(PerExpertRoutedExperts)


def _unquantized(layer: RoutedExperts, prefix: str) -> "PerExpertMethod | None":
    """Return the method of unquantized experts that have no gate; None for others."""
    if layer.moe_config.is_act_and_mul:
        return None
    return PerExpertMethod(None, layer, prefix, reads_default_dtype=False)


class PerExpertMethod(FusedMoEMethodBase):
    """Method that runs routed experts as dense products, one expert after another."""

    def __init__(
        self,
        config: CompressedTensorsConfig | None,
        layer: RoutedExperts,
        prefix: str,
        reads_default_dtype: bool,
    ):
        """Check that the layer's experts are supported.

        Args:
            config: config of the checkpoint's quantization; None if the experts are unquantized.
            layer: vLLM's module of the experts.
            prefix: name of that module.
            reads_default_dtype: whether the dense layers take their output dtype from torch's
                default dtype, as those for FP8 do.

        Raises:
            ValueError: the experts have a bias beside another gate than gpt-oss's, are weighted
                before the down projection, or run with expert parallelism.
        """
        super().__init__(layer.moe_config)
        moe = layer.moe_config
        self._alternates = layer.activation == MoEActivation.SWIGLUOAI
        if moe.has_bias != self._alternates or layer.use_ep or layer.apply_router_weight_on_input:
            raise ValueError(
                f"{prefix}: per-expert products cover experts without bias and gpt-oss's,"
                " weighted after the down projection, without expert parallelism"
            )
        self._config = config
        self._shards = _PREFIXES if moe.is_act_and_mul else {**_PREFIXES, "w13": ("w1",)}
        self.reads_default_dtype = reads_default_dtype
        self._names = {
            "w13": f"{prefix}.{{}}.{layer.ckpt_gate_proj_name}",
            "w2": f"{prefix}.{{}}.{layer.ckpt_down_proj_name}",
        }
        self.dense: dict[str, list[ReplicatedLinear]] = {}

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register parameters [E, …] in the checkpoint's layout, shaped like the dense layers'."""
        self._shapes = {
            "w13": (hidden_size, self.moe.w13_num_shards * intermediate_size_per_partition),
            "w2": (intermediate_size_per_partition, hidden_size),
        }
        self._dtype = params_dtype
        for prefix, shards in self._shards.items():
            with torch.device("meta"):
                template = self._linear(prefix, 0)
            for name, like in template.named_parameters():
                # gpt-oss's loader does not know this one
                if name == _SHAPE and self._alternates:
                    continue
                # Each shard has its own weight_shape. vLLM's reload counts the elements that it
                # loads, so the parameter must have room for all of them.
                shape = (2 * len(shards),) if name == _SHAPE else like.shape
                stacked = torch.empty(num_experts, *shape, dtype=like.dtype)
                parameter = nn.Parameter(stacked, requires_grad=False)
                loader = _loader(shards, self.moe.tp_rank, self.moe.tp_size)
                parameter.weight_loader = loader  # type: ignore[attr-defined]
                layer.register_parameter(f"{prefix}_{name}", parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Build each expert's dense layers from the loaded tensors, which are then freed."""
        loaded = dict(layer.named_parameters(recurse=False))
        # Free the previous version's layers first.
        self.dense = {}
        for prefix in self._shards:
            stacked = {
                name.removeprefix(f"{prefix}_"): parameter
                for name, parameter in loaded.items()
                if name.startswith(f"{prefix}_")
            }
            experts = len(next(iter(stacked.values())))
            self.dense[prefix] = [self._filled(prefix, e, stacked) for e in range(experts)]
        for name in loaded:
            delattr(layer, name)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """Return None, because there is no fused kernel to configure (vLLM's hook)."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, compute dtype [N, H] (vLLM's hook).

        x: compute dtype [N, H]. topk_weights: fp32 [N, K]. topk_ids: integer [N, K]. The sum over
        experts is the learner's (`sum_over_experts`).
        """

        def output(expert: int, inputs: torch.Tensor) -> torch.Tensor:
            merged = self.dense["w13"][expert](inputs)
            if self._alternates:
                return self.dense["w2"][expert](_gated(merged.float()).to(merged.dtype))
            columns = merged.shape[1] // self.moe.w13_num_shards
            hidden = torch.empty(len(inputs), columns, dtype=merged.dtype)
            apply_moe_activation(layer.activation, hidden, merged)
            return self.dense["w2"][expert](hidden)

        return sum_over_experts(x, topk_weights, topk_ids, output)

    def _linear(self, prefix: str, expert: int) -> ReplicatedLinear:
        """Return vLLM's dense layer for one of an expert's matrices, with nothing loaded."""
        # vLLM sets the default dtype for the first load only, not for reloads.
        reads = self.reads_default_dtype
        with set_default_torch_dtype(self._dtype) if reads else nullcontext():
            return ReplicatedLinear(
                *self._shapes[prefix],
                bias=self._alternates,
                params_dtype=self._dtype,
                quant_config=self._config,
                prefix=self._names[prefix].format(expert),
                return_bias=False,
                disable_tp=True,
            )

    def _filled(
        self, prefix: str, expert: int, loaded: Mapping[str, torch.Tensor]
    ) -> ReplicatedLinear:
        """Return the dense layer of one of an expert's matrices, with its loaded tensors."""
        linear = self._linear(prefix, expert)
        inputs, outputs = self._shapes[prefix]
        for name, stacked in loaded.items():
            if name != _SHAPE:
                getattr(linear, name).data.copy_(stacked[expert])
        if hasattr(linear, _SHAPE):
            getattr(linear, _SHAPE).data.copy_(torch.tensor((outputs, inputs)))
        linear.quant_method.process_weights_after_loading(linear)
        drop_loaders(linear)
        return linear


def _loader(shards: tuple[str, ...], rank: int, ranks: int) -> Callable[..., bool]:
    """Return vLLM's loader of a stacked parameter, in which a shard fills its part of the rows.

    Other shards than `shards` are gpt-oss's, and fill all rows.

    rank: number of this process among the `ranks` tensor-parallel ones. It takes its own rows or
    columns of a shard.
    """

    def load(
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        target = param.data[expert_id]
        if shard_id in shards:
            target = target.chunk(len(shards))[shards.index(shard_id)]
        for dim, size in enumerate(target.shape[: loaded_weight.ndim]):
            if ranks > 1 and loaded_weight.shape[dim] == ranks * size:
                loaded_weight = loaded_weight.narrow(dim, rank * size, size)
        target.copy_(loaded_weight.reshape(target.shape))
        return True

    return load
