"""Replacement of a transformers model's modules by low-bit layers and copies.

These read the model's parameters as their masters. Linear layers become `LowBitLinear`, fused
experts `RoutedLowBitExperts`. Everything else (embeddings, norms) gets a compute-dtype copy whose
gradient flows to its master.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedConfig, PreTrainedModel

from qarl.configs.errors import GraphError
from qarl.quant.checkpoint.families import (
    Family,
    experts_shape,
    fused_experts,
    names_of,
)
from qarl.quant.checkpoint.plan import LayerPlan, stacked_name
from qarl.quant.checkpoint.shapes import router_names
from qarl.quant.layers.compute_copy import (
    ComputeCopy,
    MasterCopy,
    MasterEmbedding,
    plain_lookup,
)
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.layers.stack import LinearStack, fuse_scales
from qarl.quant.model.layers import EngineModel, Layers
from qarl.quant.runtime.libraries import has_vllm
from qarl.quant.schemes import SchemeError, get_scheme


def replace_layers(
    model: PreTrainedModel, plan: LayerPlan, context: LayerContext, operators: str = "auto"
) -> Layers:
    """Make low-bit layers and copies of a model's parameters, without materializing anything yet.

    The parameters stay the same objects.

    Raises `SchemeError` for a quantized router that transformers' operators would multiply
    unquantized, and `GraphError` if the engine's operators are impossible although `operators`, an
    fp8 key/value cache or the model's logits need them. Both are raised before anything is changed.

    Args:
        model: its parameters become the masters.
        plan: the scheme of each layer.
        context: settings and state that the layers share.
        operators: "engine": the forward is vLLM's own model (`quant.graph`), and `model` only holds
            the parameters. "transformers": modules of `model` are replaced in place. "auto":
            "engine" for aligned models that vLLM runs with modules of known kinds, else
            "transformers".
    """
    engine = None
    why_not = ""
    if operators == "engine" or (operators == "auto" and context.aligned):
        try:
            engine = _find_engine_model(model, plan, context)
        except GraphError as error:
            if operators == "engine":
                raise
            why_not = str(error)
    if engine is None and context.aligned and context.kv_cache is not None:
        raise GraphError(
            f"quantization.kv_cache {context.kv_cache!r} needs vLLM's own model as the learner's,"
            " and this one computes with transformers' operators"
            f" ({why_not or 'learner.operators'}); omit one of them"
        )
    if engine is not None:
        return _engine_layers(model, plan, context, engine)
    refuse_changed_logits(model, why_not)
    family = names_of(model.config)
    fused = dict(fused_experts(model))
    routers = tuple(router_names(model, fused))
    _refuse_quantized_routers(plan, [family.checkpoint_name(name) for name in routers])
    linears = _replace_linears(model, family, plan, context)
    stacked: defaultdict[str, list[LowBitLinear]] = defaultdict(list)
    for name, linear in linears.items():
        stacked[stacked_name(name)].append(linear)
    fuse_scales(stacked.values())
    experts = _make_experts(model, fused, family, plan, context)
    for name, layer in zip(fused, experts.values(), strict=True):
        model.set_submodule(name, layer)
    return Layers(
        linears=linears,
        stacks={},
        experts=experts,
        copies=_replace_parameters(model, context),
        routers=routers,
        operators="transformers",
        family=family,
        why_not=why_not,
    )


def _find_engine_model(
    model: PreTrainedModel, plan: LayerPlan, context: LayerContext
) -> EngineModel:
    """Return vLLM's modules for this model.

    Raises `GraphError` if it has no such model, or multiplies other layers than the checkpoint has.
    """
    if not has_vllm():
        raise GraphError(
            "learner.operators 'engine' runs vLLM's own model, and vLLM is not installed here: pip"
            " install 'qarl-train[cpu]' or 'qarl-train[cuda]', or set learner.operators to"
            " 'transformers'"
        )
    from qarl.quant.model.engine_model import engine_model

    engine = engine_model(model, plan.shapes, context.dtype)
    _refuse_other_layers(model, engine)
    return engine


def _refuse_other_layers(model: PreTrainedModel, engine: EngineModel) -> None:
    """Raise `GraphError` if vLLM and the checkpoint differ in the layers they multiply."""
    family = names_of(model.config)
    parameters = {family.checkpoint_name(name) for name, _ in model.named_parameters()}
    modules = {family.checkpoint_name(name): module for name, module in model.named_modules()}
    multiplied = {layer for layers in engine.stacked.values() for layer in layers}
    own = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and f"{name}.weight" in parameters
    }
    # blocks may share their layers (Zamba2)
    missing = sorted(own - multiplied - {_output_head(model, family)})
    if missing:
        raise GraphError(
            f"the engine's {engine.architecture} does not multiply {missing[0]!r}, which the"
            " checkpoint has"
        )
    unknown = sorted(multiplied - modules.keys())
    if unknown:
        raise GraphError(
            f"the engine's {engine.architecture} multiplies {unknown[0]!r}, which is not a module"
            " here"
        )


def _engine_layers(
    model: PreTrainedModel, plan: LayerPlan, context: LayerContext, engine: EngineModel
) -> Layers:
    """Return low-bit layers for everything vLLM multiplies, in the model's order and vLLM's
    stacks.
    """
    family = names_of(model.config)
    fused = dict(fused_experts(model))
    parameters = {
        family.checkpoint_name(name): parameter for name, parameter in model.named_parameters()
    }
    modules = {family.checkpoint_name(name): module for name, module in model.named_modules()}
    multiplied = {layer for layers in engine.stacked.values() for layer in layers}
    head = _output_head(model, family)
    linear_names = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    for name in engine.correction_biases:
        if name in parameters:
            parameters[name].requires_grad_(False)
    chosen = {name: m for name, m in modules.items() if name in multiplied or name == head}
    linears = _make_linears(chosen, parameters, plan, context)
    stacks = {
        name: LinearStack(
            name, [linears[layer] for layer in layers], engine.custom_linears.get(name)
        )
        for name, layers in engine.stacked.items()
    }
    for name, divided in engine.divided.items():
        for layer in engine.stacked[name] if divided == "columns" else ():
            linears[layer].divide_columns()
    stacks |= {name: LinearStack(name, [linears[head]]) for name in engine.heads}
    fuse_scales(stack.parts for stack in stacks.values())
    engine_names = {layer: name for name, layer in engine.experts.items()}
    experts = _make_experts(model, fused, family, plan, context, engine_names)
    in_fp32 = {
        name
        for name, _ in model.named_parameters()
        if family.checkpoint_name(name) in engine.in_fp32
    }
    copies = _make_copies(model, [*linears.values(), *experts.values()], context, in_fp32)
    # transformers has modules of its own for these
    other_names = multiplied - linear_names
    routers = [
        name for name, _ in model.named_modules() if family.checkpoint_name(name) in other_names
    ]
    return Layers(
        linears=linears,
        stacks=stacks,
        experts=experts,
        copies=copies,
        routers=tuple(sorted({*router_names(model, fused), *routers})),
        operators="engine",
        family=family,
        engine=engine,
        frozen=tuple(
            name for name, p in model.named_parameters() if name in copies and not p.requires_grad
        ),
    )


def _make_linears(
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    plan: LayerPlan,
    context: LayerContext,
) -> dict[str, LowBitLinear]:
    """Return low-bit layers over the weights of these modules, all by checkpoint name."""
    linears = {}
    for name, module in modules.items():
        weight = parameters.get(f"{name}.weight", getattr(module, "weight", None))
        assert weight is not None, name
        bias = parameters.get(f"{name}.bias")
        scheme = plan.schemes.get(name, get_scheme("bf16"))
        linears[name] = LowBitLinear(name, weight, bias, scheme, context)
    return linears


def _make_copies(
    model: PreTrainedModel,
    layers: Sequence[LowBitLinear | RoutedLowBitExperts],
    context: LayerContext,
    in_fp32: Collection[str],
) -> dict[str, MasterCopy]:
    """Return copies of all parameters that these layers do not have, by parameter name.

    in_fp32: names of parameters whose copies are in float32.
    """
    owned = {id(master) for layer in layers for master in layer.masters}
    owned |= {id(bias) for layer in layers for bias in layer.biases}
    # An embedding has a copy even if it is also the master of a tied output head.
    embedding = model.get_input_embeddings().weight
    return {
        name: MasterCopy(parameter, context, torch.float32 if name in in_fp32 else None)
        for name, parameter in model.named_parameters()
        if id(parameter) not in owned or parameter is embedding
    }


def _output_head(model: PreTrainedModel, family: Family) -> str:
    """Return the checkpoint name of the module that computes logits.

    Raises `GraphError` if it is no linear layer.
    """
    head = model.get_output_embeddings()
    names = [
        family.checkpoint_name(name) for name, module in model.named_modules() if module is head
    ]
    if not names or not isinstance(head, nn.Linear):
        raise GraphError(
            f"{type(model).__name__} has a {type(head).__name__} for an output head, and no"
            " nn.Linear"
        )
    return names[0]


def _replace_linears(
    model: nn.Module, family: Family, plan: LayerPlan, context: LayerContext
) -> dict[str, LowBitLinear]:
    """Replace every `nn.Linear` of the model and return the new layers by checkpoint name.

    Modules that share a weight get one layer, by the first one's name.
    """
    layers: dict[str, LowBitLinear] = {}
    names: dict[int, str] = {}
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear):
            assert isinstance(linear.weight, nn.Parameter)
            layer = names.setdefault(id(linear.weight), family.checkpoint_name(name))
            if layer not in layers:
                layers[layer] = LowBitLinear(
                    layer, linear.weight, linear.bias, plan.schemes[layer], context
                )
            model.set_submodule(name, layers[layer])
    return layers


def _make_experts(
    model: PreTrainedModel,
    fused: dict[str, nn.Module],
    family: Family,
    plan: LayerPlan,
    context: LayerContext,
    engine_names: Mapping[str, str] | None = None,
) -> dict[str, RoutedLowBitExperts]:
    """Return low-bit layers over the parameters of fused experts, by checkpoint name.

    engine_names: checkpoint name → vLLM's name. Default: they are the same.
    """
    layers = {}
    config = model.config
    for name, module in fused.items():
        layer = family.checkpoint_name(name)
        first = module.get_parameter(family.experts.first_stack)
        down = module.get_parameter("down_proj")
        shape = experts_shape(module, family.experts, config)
        names = ("gate_up_proj_bias", "down_proj_bias") if shape.biased else ()
        biases = tuple(map(module.get_parameter, names))
        # Plans make sure that all experts of a layer have one scheme.
        scheme = plan.schemes[f"{layer}.0.{family.experts.down}"]
        layers[layer] = RoutedLowBitExperts(
            layer,
            first,
            down,
            shape,
            scheme,
            context,
            biases,
            (engine_names or {}).get(layer, ""),
        )
    return layers


def _replace_parameters(model: nn.Module, context: LayerContext) -> dict[str, MasterCopy]:
    """Make the modules read copies of the parameters outside linear layers and experts.

    Returns the copies by parameter name.
    """
    copies: dict[str, MasterCopy] = {}
    for prefix, module in list(model.named_modules()):
        if isinstance(module, LowBitLinear | RoutedLowBitExperts):
            continue
        if type(module) is nn.Embedding and plain_lookup(module):
            copy = copies[f"{prefix}.weight"] = MasterCopy(module.weight, context)
            model.set_submodule(prefix, MasterEmbedding(module, copy))
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{key}" if prefix else key
            copies[name] = MasterCopy(parameter, context)
            # `unsafe` skips torch's check of the dtype, which changes on purpose.
            parametrize.register_parametrization(
                module, key, ComputeCopy(copies[name]), unsafe=True
            )
    return copies


def _refuse_quantized_routers(plan: LayerPlan, routers: list[str]) -> None:
    """Raise `SchemeError` if the plan quantizes a router."""
    quantized = [name for name in routers if plan.schemes[name].quantization is not None]
    if quantized:
        raise SchemeError(
            f"a rule quantizes the router {quantized[0]!r}, which transformers' own operators"
            " multiply unquantized; drop the rule, or set learner.operators to 'engine' where the"
            " model allows"
        )


def refuse_changed_logits(model: PreTrainedModel, why_not: str) -> None:
    """Raise `GraphError` for models that change logits after the output head.

    transformers' forward is left before that.
    """
    key = changed_logits(model.config)
    if key is not None:
        remedy = (
            f", which cannot be: {why_not}" if why_not else "; set learner.operators to 'engine'"
        )
        raise GraphError(
            f"model config has {key} = {getattr(model.config, key)}: logits that change after the"
            f" output head need the engine's operators{remedy}"
        )


def changed_logits(config: PreTrainedConfig) -> str | None:
    """Return the config field that changes logits after the output head, or None."""
    keys = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    changing = (key for key in keys if getattr(config, key, None) not in (None, 1))
    return next(changing, None)
