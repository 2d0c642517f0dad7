"""Shapes and schemes of the matrices that a model multiplies with tokens, by checkpoint name.

These are linear layers, routers, and every expert's matrices. The plan and the checkpoint use these
names, in this order.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from qarl.configs.schema.run import LayerRule
from qarl.configs.schemes import check_shapes
from qarl.quant.checkpoint.families import expert_sizes, fused_experts, is_gpt_oss, names_of
from qarl.quant.checkpoint.plan import LayerPlan, make_plan
from qarl.quant.checkpoint.whole import whole_of
from qarl.quant.schemes import Scheme, SchemeError


def plan_layers(
    model: PreTrainedModel, scheme: Scheme, rules: Sequence[LayerRule] = ()
) -> LayerPlan:
    """Return the scheme and the shape of every matrix.

    Raises `SchemeError` for a model that cannot be trained, for what `make_plan` refuses, for
    matrices whose shape does not fit their scheme, and on GPUs for quantized experts with biases.

    Args:
        model: may be on the meta device, because only names, kinds and shapes are read.
        scheme: the main scheme.
        rules: layers in other schemes.
    """
    shapes = weight_shapes(model)
    plan = make_plan(scheme, rules, shapes, _never_quantized(model, shapes))
    _refuse_biased_experts(model, plan)
    check_shapes((name, plan.schemes[name].name, shape) for name, shape in shapes.items())
    whole = whole_of(model.config)
    return plan if whole is None else replace(plan, beside=whole.tower_patterns)


def weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return checkpoint layer name → (O, I) of its weight.

    Layers that share a weight (blocks of Zamba2) have the first one's name. `model` may be on the
    meta device. Raises `SchemeError` for fused experts of an unknown layout.
    """
    family = names_of(model.config)
    experts = dict(fused_experts(model))
    routers = set(router_names(model, experts))
    shapes: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    module: Any
    for name, module in model.named_modules():
        written = family.checkpoint_name(name)
        if isinstance(module, nn.Linear) or name in routers:
            if id(module.weight) in seen:
                continue
            seen.add(id(module.weight))
            rows, columns = module.weight.shape
            shapes[written] = (rows, columns)
        elif name in experts:
            count, hidden, intermediate = expert_sizes(module)
            for expert in range(count):
                for projection in family.experts.projections[:-1]:
                    shapes[f"{written}.{expert}.{projection}"] = (intermediate, hidden)
                shapes[f"{written}.{expert}.{family.experts.down}"] = (hidden, intermediate)
    return shapes


def expert_modules(model: PreTrainedModel) -> list[str]:
    """Return checkpoint names of the modules of routed experts ("model.layers.0.mlp.experts")."""
    family = names_of(model.config)
    return [family.checkpoint_name(name) for name, _ in fused_experts(model)]


def router_names(model: PreTrainedModel, experts: dict[str, nn.Module]) -> list[str]:
    """Return the module names of the routers beside these fused experts.

    A router is a module whose weight has one row for each expert.
    """
    names = []
    for name, fused in experts.items():
        parent, _, own = name.rpartition(".")
        count = fused.get_parameter("down_proj").shape[0]
        for sibling, module in model.get_submodule(parent).named_modules():
            weight = module._parameters.get("weight")
            if weight is not None and sibling.split(".")[0] != own and weight.shape[0] == count:
                names.append(f"{parent}.{sibling}")
    return names


def _refuse_biased_experts(model: PreTrainedModel, plan: LayerPlan) -> None:
    """Raise `SchemeError` if the plan quantizes experts with biases (gpt-oss) on a GPU."""
    if not torch.cuda.is_available():
        return
    family = names_of(model.config)
    for name, experts in fused_experts(model):
        layer = family.checkpoint_name(name)
        scheme = plan.schemes[f"{layer}.0.{family.experts.down}"]
        if is_gpt_oss(experts) and scheme.quantization is not None:
            raise SchemeError(
                f"scheme {scheme.name!r} would quantize the experts {layer!r}, which have biases:"
                " QaRL has their low-bit products on CPUs alone; leave the experts in the compute"
                " dtype by a layer rule (--layers '*.experts.*=bf16'), which quantizes attention"
                " alone, or take scheme bf16"
            )


def _never_quantized(
    model: PreTrainedModel,
    shapes: dict[str, tuple[int, int]],
) -> dict[str, str]:
    """Return the modules with a weight matrix that no scheme can quantize → the reason."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    family = names_of(model.config)
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
