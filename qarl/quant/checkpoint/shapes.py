"""Shapes and schemes of the matrices that a model multiplies with tokens, by checkpoint name.

These are linear layers, routers, and every expert's matrices. The plan and the checkpoint use these
names, in this order.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from qarl.configs.schema.run import LayerRule
from qarl.configs.schemes import check_shapes
from qarl.quant.checkpoint.families import family_of, fused_experts
from qarl.quant.checkpoint.plan import LayerPlan, make_plan
from qarl.quant.schemes import Scheme


def plan_layers(
    model: PreTrainedModel, scheme: Scheme, rules: Sequence[LayerRule] = ()
) -> LayerPlan:
    """Return the scheme of every matrix.

    Raises `SchemeError` for a model that cannot be trained, for what `make_plan` refuses, and for
    matrices whose shape does not fit their scheme.

    Args:
        model: may be on the meta device, because only names, kinds and shapes are read.
        scheme: the main scheme.
        rules: layers in other schemes.
    """
    shapes = weight_shapes(model)
    plan = make_plan(scheme, rules, list(shapes), _never_quantized(model, shapes))
    check_shapes((name, plan.schemes[name].name, shape) for name, shape in shapes.items())
    return plan


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return checkpoint layer name → (O, I) of its weight.

    `model` may be on the meta device. Raises `SchemeError` for fused experts of an unknown layout.
    """
    family = family_of(model.config.model_type)
    experts = dict(fused_experts(model))
    routers = set(router_names(model, experts))
    shapes: dict[str, tuple[int, int]] = {}
    module: Any
    for name, module in model.named_modules():
        written = family.checkpoint_name(name)
        if isinstance(module, nn.Linear) or name in routers:
            rows, columns = module.weight.shape
            shapes[written] = (rows, columns)
        elif name in experts:
            count, merged, hidden = module.gate_up_proj.shape
            for expert in range(count):
                for projection in (family.experts.gate, family.experts.up):
                    shapes[f"{written}.{expert}.{projection}"] = (merged // 2, hidden)
                shapes[f"{written}.{expert}.{family.experts.down}"] = (hidden, merged // 2)
    return shapes


def expert_modules(model: PreTrainedModel) -> list[str]:
    """Return checkpoint names of the modules of routed experts ("model.layers.0.mlp.experts")."""
    family = family_of(model.config.model_type)
    return [family.checkpoint_name(name) for name, _ in fused_experts(model)]


def router_names(model: PreTrainedModel, experts: dict[str, nn.Module]) -> list[str]:
    """Return the module names of the routers beside these fused experts.

    A router is a module whose weight has one row for each expert.
    """
    names = []
    for name, fused in experts.items():
        parent, _, own = name.rpartition(".")
        count = fused.get_parameter("gate_up_proj").shape[0]
        for sibling, module in model.get_submodule(parent).named_modules():
            weight = module._parameters.get("weight")
            if weight is not None and sibling.split(".")[0] != own and weight.shape[0] == count:
                names.append(f"{parent}.{sibling}")
    return names


def _never_quantized(
    model: PreTrainedModel,
    shapes: dict[str, tuple[int, int]],
) -> dict[str, str]:
    """Return the modules with a weight matrix that no scheme can quantize → the reason."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    family = family_of(model.config.model_type)
    reasons = {}
    for name, module in model.named_modules():
        written = family.checkpoint_name(name)
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding):
            reasons[written] = (
                "an embedding is looked up, not multiplied, so it has no low-bit product"
            )
        elif module is head and weight is getattr(embedding, "weight", None):
            reasons[written] = (
                "this output head is tied to the embedding and has no tensor of its own"
            )
        elif isinstance(weight, nn.Parameter) and weight.ndim == 2 and written not in shapes:
            reasons[written] = (
                f"it is a {type(module).__name__}, no nn.Linear, and has no low-bit product here"
            )
    return reasons
