"""Quantized mixture-of-experts on CPUs. vLLM 0.32 has none for CPUs without AMX ("No WNA16 MoE
backend…"); with AMX it multiplies int4 weights with int8 activations, whatever the checkpoint says,
and has no W4A8 and FP8 experts.

Each expert's two products go through the dense low-bit layer that vLLM itself builds for the
scheme: gate and up projection merged into one, then the gated activation, then the down projection.
Registered as the `compressed-tensors` config, whose other layers keep vLLM's methods. Remove it
when vLLM's own method selection (`CompressedTensorsMoEMethod.get_moe_method`) finds a backend on
every CPU that leaves activations as the scheme says.

Axes: N tokens, K experts a token, E experts, H hidden columns, I expert columns.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.quant.kernels.experts_loop import sum_over_experts
from qarl.quant.kernels.vllm_layers import drop_loaders

_PREFIXES = {"w13": ("w1", "w3"), "w2": ("w2",)}
"""vLLM's names of an expert's matrices → the checkpoint shards stacked in them (gate and up;
down).
"""


class PerExpertConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors config with `PerExpertMethod` for quantized experts."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """vLLM's hook: the method of one layer."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        self._add_fused_moe_to_target_scheme_map()
        projections = (
            layer.ckpt_gate_proj_name,
            layer.ckpt_up_proj_name,
            layer.ckpt_down_proj_name,
        )
        schemes = [
            self.get_scheme_dict(layer, f"{prefix}.0.{projection}") for projection in projections
        ]
        if any(scheme != schemes[0] for scheme in schemes):
            raise ValueError(
                f"{prefix}: all projections of a layer's experts need one scheme, found {schemes}"
            )
        if schemes[0] is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        weights: Any = schemes[0]["weights"]
        return PerExpertMethod(self, layer, prefix, weights.type == "float")


class PerExpertMethod(FusedMoEMethodBase):
    """Runs routed experts as dense low-bit products, one expert after another.

    reads_default_dtype: whether their layers take the output dtype from torch's default, as FP8's
    do.
    """

    def __init__(
        self,
        config: CompressedTensorsConfig,
        layer: RoutedExperts,
        prefix: str,
        reads_default_dtype: bool,
    ):
        super().__init__(layer.moe_config)
        config_of = layer.moe_config
        if (
            config_of.has_bias
            or not config_of.is_act_and_mul
            or layer.use_ep
            or layer.apply_router_weight_on_input
        ):
            raise ValueError(
                f"{prefix}: per-expert products cover gated experts without bias, weighted after"
                " the down projection, without expert parallelism"
            )
        self._config = config
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
        """Checkpoint-layout parameters [E, …], shaped as the dense layer's own."""
        self._shapes = {
            "w13": (hidden_size, 2 * intermediate_size_per_partition),
            "w2": (intermediate_size_per_partition, hidden_size),
        }
        self._dtype = params_dtype
        for prefix, shards in _PREFIXES.items():
            with torch.device("meta"):
                template = self._linear(prefix, 0)
            for name, like in template.named_parameters():
                # Every shard brings a shape of its own; vLLM's reload counts elements and must find
                # room for all.
                shape = (2 * len(shards),) if name == "weight_shape" else like.shape
                stacked = torch.empty(num_experts, *shape, dtype=like.dtype)
                parameter = nn.Parameter(stacked, requires_grad=False)
                parameter.weight_loader = _loader(shards)  # type: ignore[attr-defined]
                layer.register_parameter(f"{prefix}_{name}", parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Build each expert's dense layers from the loaded tensors, which are then freed."""
        loaded = dict(layer.named_parameters(recurse=False))
        self.dense = {}  # those of the version before, which go first
        for prefix in _PREFIXES:
            mine = {
                n.removeprefix(f"{prefix}_"): p
                for n, p in loaded.items()
                if n.startswith(f"{prefix}_")
            }
            experts = len(next(iter(mine.values())))
            self.dense[prefix] = [self._filled(prefix, e, mine) for e in range(experts)]
        for name in loaded:
            delattr(layer, name)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: there is no fused kernel to configure."""

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: compute dtype [N, H]; topk_weights: fp32 [N, K]; topk_ids: integer [N, K] → compute
        dtype [N, H].

        The sum over experts is that of the learner (`sum_over_experts`).
        """

        def one(expert: int, inputs: torch.Tensor) -> torch.Tensor:
            merged = self.dense["w13"][expert](inputs)
            hidden = torch.empty(len(inputs), merged.shape[1] // 2, dtype=merged.dtype)
            apply_moe_activation(layer.activation, hidden, merged)
            return self.dense["w2"][expert](hidden)

        return sum_over_experts(x, topk_weights, topk_ids, one)

    def _linear(self, prefix: str, expert: int) -> ReplicatedLinear:
        # vLLM sets the default for the first load only.
        with set_default_torch_dtype(self._dtype) if self.reads_default_dtype else nullcontext():
            return ReplicatedLinear(
                *self._shapes[prefix],
                bias=False,
                params_dtype=self._dtype,
                quant_config=self._config,
                prefix=self._names[prefix].format(expert),
                return_bias=False,
                disable_tp=True,
            )

    def _filled(
        self, prefix: str, expert: int, loaded: Mapping[str, torch.Tensor]
    ) -> ReplicatedLinear:
        linear = self._linear(prefix, expert)
        for name, stacked in loaded.items():
            inputs, outputs = self._shapes[prefix]
            value = torch.tensor((outputs, inputs)) if name == "weight_shape" else stacked[expert]
            getattr(linear, name).data.copy_(value)
        linear.quant_method.process_weights_after_loading(linear)
        drop_loaders(linear)
        return linear


def _loader(shards: tuple[str, ...]) -> Callable[..., bool]:
    """vLLM's loader of one stacked parameter: a shard fills its share of an expert's rows."""

    def load(
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        target = param.data[expert_id].chunk(len(shards))[shards.index(shard_id)]
        target.copy_(loaded_weight.view(target.shape))
        return True

    return load
