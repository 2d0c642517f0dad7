"""Scales kept across weight versions of a `LowBitModel`, and a start from calibrated codes.

docs/guide/scales.md says what both are worth.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.schema.quantization import ScaleRule
from qarl.quant.checkpoint.plan import LayerPlan
from qarl.quant.layers.low_bit_layer import LowBitLayer
from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.code_changes import quantized_weights
from qarl.quant.model.low_bit_model import LowBitModel
from qarl.quant.schemes import SchemeError, get_scheme, is_integer
from qarl.quant.types import LowBitTensor


@dataclass(frozen=True)
class _KeptScales:
    """One weight whose scales are kept."""

    name: str
    """Name of its master."""
    layer: LowBitLayer[Any, Any]
    """The layer that multiplies it."""
    index: int
    """Its index among the layer's masters."""
    weight: LowBitWeight
    """Its present version."""

    @property
    def master(self) -> torch.Tensor:
        """The parameter it is rounded from."""
        return self.layer.masters[self.index]


def check_scale_rule(rule: ScaleRule, plan: LayerPlan) -> None:
    """Raise `SchemeError` if the rule is not for the scales of this plan."""
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
    """Make later versions with the scales of the present one.

    Raises what `check_scale_rule` raises.
    """
    check_scale_rule("kept", model.plan)
    for layer in model.low_bit_layers():
        layer.keep_scales()


def scales_state(model: LowBitModel) -> dict[str, torch.Tensor]:
    """Return what a checkpoint needs in addition to masters to reproduce the weight versions.

    Keys are names of weights, with their kept scales, and NAME.move, with the offset that is added
    to a master before it is rounded.
    """
    state: dict[str, torch.Tensor] = {}
    offsets: dict[str, torch.Tensor] = {}
    for kept in _weights_with_kept_scales(model):
        if kept.weight.scale is not None:
            state[kept.name] = kept.weight.scale
        if kept.index in kept.layer.offsets:
            offsets[f"{kept.name}.move"] = kept.layer.offsets[kept.index]
    return state | offsets


def load_scales_state(model: LowBitModel, state: Mapping[str, torch.Tensor]) -> None:
    """Restore a `scales_state`; the next refresh uses it.

    Raises `ConfigError` if the state is of other weights.
    """
    for kept in _weights_with_kept_scales(model):
        if f"{kept.name}.move" in state:
            offset = torch.empty_like(kept.master, dtype=torch.float32)
            kept.layer.offsets[kept.index] = offset
    ours = scales_state(model)
    differing = sorted(state.keys() ^ ours.keys())
    if differing:
        raise ConfigError(
            f"the checkpoint keeps the scales of {len(state)} weights, this run those of"
            f" {len(ours)}, the first that differs being {differing[0]!r}; resume with the"
            " quantization.scale it was written with"
        )
    for name, tensor in ours.items():
        tensor.copy_(state[name])


@torch.no_grad()
def start_from_codes(
    model: LowBitModel, tensors: Sequence[LowBitTensor], keep_masters: bool = False
) -> None:
    """Make `tensors` the present weight version, with their scales kept from here on.

    Every master is moved by whole scales to where it rounds to its code. With `keep_masters` the
    masters stay and the offsets are stored in the layers: an unaligned learner trains the masters'
    own policy.

    Raises `SchemeError` if these masters' version differs in any bit: masters that are too coarse
    for the codes, or unquantized tensors that were changed.

    Args:
        model: changed in place.
        tensors: codes and scales that others computed, in the order of
            `LowBitModel.low_bit_tensors`.
        keep_masters: store offsets instead of moving masters.
    """
    keep_scales(model)
    for ours, theirs in zip(model.low_bit_tensors(), tensors, strict=True):
        assert ours.name == theirs.name, f"{theirs.name!r} comes where {ours.name!r} should"
        ours.tensor.copy_(theirs.tensor)
    for kept in _weights_with_kept_scales(model):
        moved = _moved_to_codes(kept.master, kept.weight)
        if keep_masters:
            kept.layer.offsets[kept.index] = moved - kept.master
        else:
            kept.master.copy_(moved)
    model.refresh()
    for ours, theirs in zip(model.low_bit_tensors(), tensors, strict=True):
        if not torch.equal(ours.tensor.cpu(), theirs.tensor):
            dtype = str(next(iter(model.loaded.values())).dtype).removeprefix("torch.")
            raise SchemeError(
                f"{ours.name!r} as calibrated cannot be made from masters in {dtype}; set"
                " learner.master_dtype to float32"
            )


def _weights_with_kept_scales(model: LowBitModel) -> Iterator[_KeptScales]:
    """Yield every weight whose scales are kept."""
    names = {id(parameter): name for name, parameter in model.loaded.items()}
    for layer in model.low_bit_layers():
        if layer.keeps_scales:
            pairs = zip(layer.masters, quantized_weights(layer.low_bit), strict=True)
            for index, (master, weight) in enumerate(pairs):
                yield _KeptScales(
                    name=names[id(master)],
                    layer=layer,
                    index=index,
                    weight=weight,
                )


def _moved_to_codes(master: torch.Tensor, weight: LowBitWeight) -> torch.Tensor:
    """Return the master moved by whole scales to where it rounds to the weight's codes, fp32.

    The shape is the master's. What rounding left of a value is kept, so that later updates change
    codes as often as in a rounded model. (With the nearest value of each code, every moved weight
    would be at a border between codes, and any small update would change it back.) Values keep a
    distance from the next code of a thousandth of a scale, or as much more as the master's dtype
    might round.
    """
    args = weight.scheme.weights
    assert args is not None
    assert weight.scale is not None
    grouped = (*weight.scale.shape, -1)
    centre = weight.dequantized().view(grouped)
    scale = weight.wide_scale().unsqueeze(-1)
    # how far from its code a value may be, in scales
    rounding = 2**args.num_bits * torch.finfo(master.dtype).eps
    reach = max(0.0, min(0.499, 0.5 - rounding))
    steps = master.to(torch.float32).view(grouped) / scale
    rest = (steps - steps.round()).clamp(-reach, reach)
    return (centre + rest * scale).view(master.shape)
