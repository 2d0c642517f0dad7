"""Scales that outlive a weight version, on a `LowBitModel`, and a start from codes that others
computed under theirs.

docs/guide/scales.md has what both are worth.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.schema.quantization import ScaleRule
from qarl.quant.checkpoint.plan import Plan
from qarl.quant.layers.low_bit_layer import LowBitLayer
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.code_changes import quantized_weights
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import SchemeError, get_scheme, is_integer
from qarl.quant.types import LowBitTensor


def check_scale_rule(rule: ScaleRule, plan: Plan) -> None:
    """Raise `SchemeError` for a plan with scales the rule is not for."""
    if rule == "minmax":
        return
    remedy = (
        "leave quantization.scale at minmax, or choose a scheme with integer weights (w4a16,"
        " w8a8, …)"
    )
    if not plan.quantized:
        raise SchemeError(
            f"quantization.scale {rule!r} with scheme {plan.main.name!r}, which has no scales;"
            f" {remedy}"
        )
    for name, layers in plan.quantized.items():
        weights = get_scheme(name).weights
        if weights is None or not is_integer(weights):
            raise SchemeError(
                f"quantization.scale {rule!r} is for integer weights, and scheme {name!r} of layer"
                f" {layers[0]!r} has others; {remedy}"
            )


def keep_scales(model: LowBitModel) -> None:
    """Make later versions with the scales of the present one. Raises what `check_scale_rule`
    raises.
    """
    check_scale_rule("kept", model.plan)
    for layer in model.low_bit_layers():
        layer.keep_scales()


def scales_state(model: LowBitModel) -> dict[str, torch.Tensor]:
    """What a checkpoint needs beside masters to make the same versions: kept scales by the name of
    their weight, and by NAME.move what is added to a master before it is rounded.
    """
    scales = {name: weight.scale for name, _, _, weight in _kept(model) if weight.scale is not None}
    return scales | {
        f"{name}.move": layer.moves[at] for name, layer, at, _ in _kept(model) if at in layer.moves
    }


def load_scales_state(model: LowBitModel, state: Mapping[str, torch.Tensor]) -> None:
    """Take over a `scales_state`; the next refresh uses it. Raises `ConfigError` where it is of
    other weights.
    """
    for name, layer, at, _ in _kept(model):
        if f"{name}.move" in state:
            layer.moves[at] = torch.empty_like(layer.masters[at], dtype=torch.float32)
    ours = scales_state(model)
    other = sorted(state.keys() ^ ours.keys())
    if other:
        raise ConfigError(
            f"the checkpoint keeps the scales of {len(state)} weights, this run those of"
            f" {len(ours)}, the first that differs being {other[0]!r}; resume with the"
            " quantization.scale it was written with"
        )
    for name, tensor in ours.items():
        tensor.copy_(state[name])


@torch.no_grad()
def start_from_codes(
    model: LowBitModel, tensors: Sequence[LowBitTensor], keep_masters: bool = False
) -> None:
    """Make the present weight version that of `tensors`, in the order of
    `LowBitModel.low_bit_tensors`.

    Their scales are kept from here on. Every master is moved by whole scales to where it rounds to
    its code, or stays with the move kept beside it (`keep_masters`): an unaligned learner's, whose
    own policy they are. Raises `SchemeError` where the version that these masters give differs in
    any bit: masters too coarse for the codes, or unquantized tensors that were changed.
    """
    keep_scales(model)
    for ours, theirs in zip(model.low_bit_tensors(), tensors, strict=True):
        assert ours.name == theirs.name, f"{theirs.name!r} comes where {ours.name!r} should"
        ours.tensor.copy_(theirs.tensor)
    for _, layer, at, weight in _kept(model):
        master, moved = layer.masters[at], _moved_to_codes(layer.masters[at], weight)
        if keep_masters:
            layer.moves[at] = moved - master
        else:
            master.copy_(moved)
    model.refresh()
    for ours, theirs in zip(model.low_bit_tensors(), tensors, strict=True):
        if not torch.equal(ours.tensor.cpu(), theirs.tensor):
            dtype = str(next(iter(model.loaded.values())).dtype).removeprefix("torch.")
            raise SchemeError(
                f"{ours.name!r} as calibrated cannot be made from masters in {dtype}; set"
                " learner.master_dtype to float32"
            )


def _kept(
    model: LowBitModel,
) -> Iterator[tuple[str, LowBitLayer[Any, Any], int, LowBitWeight]]:
    """(name, its layer, its place there, its present version) of every weight whose scales are
    kept.
    """
    names = {id(parameter): name for name, parameter in model.loaded.items()}
    for layer in model.low_bit_layers():
        if layer.keeps_scales:
            for at, (master, weight) in enumerate(
                zip(layer.masters, quantized_weights(layer.low_bit), strict=True)
            ):
                yield names[id(master)], layer, at, weight


def _moved_to_codes(master: torch.Tensor, weight: LowBitWeight) -> torch.Tensor:
    """The master's values moved by whole scales to where they round to its weight's codes, fp32, in
    the master's shape.

    What rounding left of a value stays, so codes change with the updates that follow as often as a
    rounded model's do. (The nearest value of each code would put every moved weight at a border, to
    change back by any small update.) Kept from the next code by a thousandth of a scale, or by as
    much more as the master's dtype might round.
    """
    args = weight.scheme.weights
    assert args is not None
    assert weight.scale is not None
    grouped = (*weight.scale.shape, -1)
    centre, scale = (
        weight.dequantized().view(grouped),
        weight.wide_scale().unsqueeze(-1),
    )
    reach = max(0.0, min(0.499, 0.5 - 2**args.num_bits * torch.finfo(master.dtype).eps))
    steps = master.to(torch.float32).view(grouped) / scale
    return (centre + (steps - steps.round()).clamp(-reach, reach) * scale).view(master.shape)
