"""Which matrices of a model are multiplied with tokens, by checkpoint name: linear layers, routers, every expert's.

The audit, the plan and the checkpoint all speak of these names, in this order.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from quant.layout import expert_layout, fused_experts


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Checkpoint layer name → (O, I) of its weight. model: may be on the meta device.

    Raises `SchemeError` for fused experts of an unknown layout.
    """
    layout = expert_layout(model.config.model_type)
    experts = dict(fused_experts(model))
    routers = set(router_names(experts))
    shapes: dict[str, tuple[int, int]] = {}
    module: Any
    for name, module in model.named_modules():
        written = layout.checkpoint_name(name)
        if isinstance(module, nn.Linear) or name in routers:
            rows, columns = module.weight.shape
            shapes[written] = (rows, columns)
        elif name in experts:
            count, merged, hidden = module.gate_up_proj.shape
            for expert in range(count):
                for projection in (layout.gate, layout.up):
                    shapes[f"{written}.{expert}.{projection}"] = (merged // 2, hidden)
                shapes[f"{written}.{expert}.{layout.down}"] = (hidden, merged // 2)
    return shapes


def router_names(experts: dict[str, nn.Module]) -> list[str]:
    """The routers beside these fused experts, by module name."""
    return [f"{name.rpartition('.')[0]}.gate" for name in experts]
