"""Compare what two sides declare: settings, names of layers, and which layers are codes of what.

No values are compared here.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme

from qarl.quant.schemes import is_protected
from qarl.verify.findings import Cause, VerifyInputError, fault
from qarl.verify.names import HEAD
from qarl.verify.quantization import describe, same
from qarl.verify.sides import Side

_SETTINGS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
)
"""Settings of config.json that change what a model computes."""


def differing_settings(trainer: Side, engine: Side) -> Iterator[Cause]:
    """Yield a cause for each setting of config.json in which the sides differ."""
    for name in _SETTINGS:
        ours, theirs = trainer.config.get(name), engine.config.get(name)
        if name in trainer.config and name in engine.config and not _same_setting(ours, theirs):
            remedy = "copy the trainer's config.json, but for its quantization_config"
            if name == "model_type":
                remedy = "check that both sides are the same model"
            yield Cause(
                name="settings",
                level="fault",
                evidence=f"config.json: {name} is {ours!r} (trainer) and {theirs!r} (engine)",
                remedy=remedy,
            )


def _same_setting(one: Any, other: Any) -> bool:
    """Return whether two values of config.json are equal. Real numbers may be rounded to float32,
    as those of GGUF files are.
    """
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _same_setting(value, other[name]) for name, value in one.items()
        )
    return one == other


def missing_layers(trainer: Side, engine: Side) -> Iterator[Cause]:
    """Yield a cause for layers that one side alone has."""
    remedies = {
        "trainer": "publish all tensors, by transformers' names",
        "engine": "give all of the trainer's tensors, or compare with the model that it trains",
    }
    for side, other in ((trainer, engine), (engine, trainer)):
        alone = [
            name for name in side.layers if name not in other.layers and not name.endswith(HEAD)
        ]
        count = "1 layer is" if len(alone) == 1 else f"{len(alone)} layers are"
        if alone and not other.effective:
            yield Cause(
                name="missing",
                level="fault",
                evidence=f"{count} the {side.role}'s alone",
                remedy=remedies[side.role],
                about=tuple(alone),
            )


def declared_differently(trainer: Side, engine: Side, layer: str) -> Cause | None:
    """Return the cause if the two sides mean to quantize a layer differently, or one does not hold
    what it means to.
    """
    if not engine.is_linear(layer) and not engine.has_codes(layer):
        return None
    quantization = engine.quantization
    if quantization is not None and not engine.effective and not engine.has_codes(layer):
        scheme = quantization.scheme(layer)
        if scheme is not None and scheme.weights is not None:
            entry = quantization.substring_of(layer)
            why = "it was left out of the codes"
            if entry is not None:
                why = f"ignore {entry!r} is a part of its name and does not match it"
            return fault(
                "ignore-list",
                layer,
                f"the engine's config.json quantizes it ({describe(scheme)}), and its tensor is in"
                f" 16 or 32 bits: {why}",
                "list full names in ignore, or a pattern that starts with re: and matches from the"
                " start of the name",
            )
    other = engine.stored_scheme(layer)
    if trainer.quantization is None:
        if other is not None and is_protected(layer):
            return _special(layer, other)
        return None
    mine = trainer.quantization.scheme(layer)
    if same(mine, other):
        return None
    if mine is None and is_protected(layer):
        return _special(layer, other)
    if mine is None or other is None:
        side = trainer if mine is None else engine
        entry = side.quantization and side.quantization.ignored_by(layer)
        why = f" (ignore {entry!r})" if entry else ""
        return fault(
            "ignore-list",
            layer,
            f"the {side.role} leaves it in 16 or 32 bits{why}, the other side has"
            f" {describe(mine or other)}",
            "give both sides the same ignore list",
        )
    return fault(
        "scheme",
        layer,
        f"the trainer means {describe(mine)}, the engine has {describe(other)}",
        "give both sides the same scheme",
    )


def _special(layer: str, scheme: QuantizationScheme | None) -> Cause:
    kind = "router"
    if layer.endswith((HEAD, "embed_tokens")):
        kind = "output head" if layer.endswith(HEAD) else "embedding"
    return fault(
        "protected",
        layer,
        f"the engine's {kind} is quantized ({describe(scheme)})",
        "add it to the engine's ignore list: re:.*mlp\\.gate$, lm_head",
    )


def broken_codes(
    side: Side,
    layer: str,
    tensors: dict[str, torch.Tensor],
) -> Cause | None:
    """Return the cause if a layer's codes do not have the shapes that its scheme gives them."""
    if side.effective or not side.has_codes(layer):
        return None
    if side.quantization is None:
        raise VerifyInputError(
            f"the {side.role}'s layer {layer!r} holds codes ({', '.join(sorted(tensors))}), and"
            " nothing says of which scheme: config.json has no quantization_config"
        )
    scheme = side.quantization.scheme(layer)
    if scheme is None or scheme.weights is None:
        entry = side.quantization.ignored_by(layer)
        why = f"ignored by {entry!r}" if entry else "not a target"
        return fault(
            "declared",
            layer,
            f"the {side.role}'s tensors are codes, and its config.json leaves the layer alone"
            f" ({why})",
            "write config.json from the same plan as the codes",
        )
    scale = tensors.get("weight_scale")
    if scale is None:
        return fault("missing", layer, f"the {side.role} has codes without a scale")
    columns = _columns(tensors, scheme)
    size = scheme.weights.group_size
    groups = columns // size if size and size > 0 else None
    if groups is not None and scale.ndim == 2 and scale.shape[1] != groups:
        return fault(
            "group-size",
            layer,
            f"the {side.role}'s scales have {scale.shape[1]} columns, and groups of {size} in"
            f" {columns} columns need {groups}: the codes have groups of"
            f" {columns // scale.shape[1]}",
            "write config.json from the same scheme as the codes",
        )
    return None


def _columns(tensors: dict[str, torch.Tensor], scheme: QuantizationScheme) -> int:
    """Return the input columns of a layer with codes."""
    assert scheme.weights is not None
    if "weight_shape" in tensors:
        return int(tensors["weight_shape"][1])
    if "weight" in tensors:
        return tensors["weight"].shape[1]
    packed = tensors["weight_packed"]
    return packed.shape[1] * packed.dtype.itemsize * 8 // scheme.weights.num_bits


def uneven_layers(engine: Side) -> Iterator[Cause]:
    """Yield a note on layers without codes whose namesakes in other decoder layers have them."""
    kinds: dict[str, dict[bool, list[str]]] = {}
    for layer in engine.layers:
        if engine.is_linear(layer):
            kind = ".".join(part for part in layer.split(".") if not part.isdigit())
            kinds.setdefault(kind, {}).setdefault(engine.has_codes(layer), []).append(layer)
    for kind, by_codes in kinds.items():
        if len(by_codes) == 2:
            yield Cause(
                name="uneven",
                level="note",
                evidence=(
                    f"{len(by_codes[False])} of {sum(map(len, by_codes.values()))} layers {kind}"
                    " are in 16 or 32 bits, the others are codes; whether that is meant is unknown"
                ),
                about=tuple(by_codes[False]),
            )
