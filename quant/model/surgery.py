"""Replaces a transformers model's modules by low-bit layers and copies, which read the model's parameters as masters.

Linear layers become `LowBitLinear`, fused experts `RoutedLowBitExperts`; everything else (embeddings, norms) keeps a
compute-dtype copy whose gradient flows to its master.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from qarl.quant.checkpoint.families import ExpertsShape, Family, family_of, fused_experts
from qarl.quant.checkpoint.plan import Plan
from qarl.quant.checkpoint.shapes import router_names
from qarl.quant.layers.compute_copy import MasterCopy, MasterEmbedding, detach_copy, plain_lookup
from qarl.quant.layers.context import LayerContext
from qarl.quant.layers.experts import RoutedLowBitExperts
from qarl.quant.layers.linear import LowBitLinear
from qarl.quant.layers.stack import LinearStack, fuse_scales, stack_linears
from qarl.quant.operators.autograd import GatedMLP
from qarl.quant.operators.decoder import EngineAttention, install_engine_operators, why_not
from qarl.quant.runtime.shards import whole_shape
from qarl.quant.schemes import SchemeError


@dataclass(frozen=True)
class Layers:
    """What a model is made of. linears, experts: by checkpoint name. copies: of everything else, by parameter name.
    routers: by module name. operators: "engine" or "transformers". family: how checkpoints name all of it. stacks: of
    linear layers, by the engine's name of the whole; none with transformers' operators, which multiply each alone."""

    linears: dict[str, LowBitLinear]
    stacks: dict[str, LinearStack]
    experts: dict[str, RoutedLowBitExperts]
    copies: dict[str, MasterCopy]
    routers: tuple[str, ...]
    operators: str
    family: Family

    def low_bit(self) -> Iterator[LowBitLinear | RoutedLowBitExperts]:
        """All that is materialized: linear layers, then experts."""
        yield from self.linears.values()
        yield from self.experts.values()


def replace_layers(model: PreTrainedModel, plan: Plan, context: LayerContext, operators: str = "auto") -> Layers:
    """Replace modules of `model` in place; its parameters stay the same objects. Nothing is materialized yet.

    operators: "engine" (`quant.operators.decoder`), "transformers", or "auto": the engine's for aligned models they
    fit. Raises `SchemeError` for a quantized router that transformers' operators would multiply unquantized, and
    `OperatorError` for "engine" where it does not fit, before anything is changed.
    """
    if operators == "auto":
        operators = "engine" if context.aligned and not why_not(model) else "transformers"
    family = family_of(model.config.model_type)
    fused = dict(fused_experts(model))
    routers = tuple(router_names(fused))
    if operators == "engine":
        install_engine_operators(model, context)
    else:
        _refuse_quantized_routers(plan, [family.checkpoint_name(name) for name in routers])
    linears = _replace_linears(model, family, plan, context)
    stacks = stack_linears(linears, family.stacked)
    fuse_scales(stacks.values())
    if operators == "engine":
        _multiply_stacks(model, stacks, family)
    experts = _replace_experts(model, fused, family, plan, context)
    return Layers(
        linears=linears,
        stacks=stacks if operators == "engine" else {},
        experts=experts,
        copies=_detach_copies(model, context),
        routers=routers,
        operators=operators,
        family=family,
    )


def _replace_linears(model: nn.Module, family: Family, plan: Plan, context: LayerContext) -> dict[str, LowBitLinear]:
    replaced = {}
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear):
            assert isinstance(linear.weight, nn.Parameter)
            layer = family.checkpoint_name(name)
            replaced[layer] = LowBitLinear(layer, linear.weight, linear.bias, plan.scheme(layer), context)
            model.set_submodule(name, replaced[layer])
    return replaced


def _multiply_stacks(model: nn.Module, stacks: dict[str, LinearStack], family: Family) -> None:
    """Have the decoder's attention and MLP multiply their stacks."""
    for name, module in model.named_modules():
        layer = family.checkpoint_name(name)
        if isinstance(module, EngineAttention):
            module.qkv = stacks.get(f"{layer}.qkv_proj")
        elif isinstance(module, GatedMLP):
            module.gate_up = stacks.get(f"{layer}.gate_up_proj")


def _replace_experts(
    model: PreTrainedModel, fused: dict[str, nn.Module], family: Family, plan: Plan, context: LayerContext
) -> dict[str, RoutedLowBitExperts]:
    replaced = {}
    for name, module in fused.items():
        layer, config = family.checkpoint_name(name), model.config
        gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
        count, merged, hidden = whole_shape(gate_up)
        assert family.experts is not None
        shape = ExpertsShape(
            experts=count,
            top_k=config.num_experts_per_tok,
            hidden=hidden,
            intermediate=merged // 2,
            activation=config.hidden_act,
            layout=family.experts,
        )
        scheme = plan.scheme(f"{layer}.0.{family.experts.down}")  # one for all, as plans make sure
        replaced[layer] = RoutedLowBitExperts(layer, gate_up, down, shape, scheme, context)
        model.set_submodule(name, replaced[layer])
    return replaced


def _detach_copies(model: nn.Module, context: LayerContext) -> dict[str, MasterCopy]:
    """Let everything outside linear layers and experts read compute-dtype copies; name → copy."""
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
            detach_copy(module, key, copies[name])
    return copies


def _refuse_quantized_routers(plan: Plan, routers: list[str]) -> None:
    forced = [name for name in routers if plan.scheme(name).quantization is not None]
    if forced:
        raise SchemeError(
            f"a rule quantizes the router {forced[0]!r}, which transformers' own operators multiply unquantized; drop "
            "the rule, or set learner.operators to 'engine' where the model allows"
        )
