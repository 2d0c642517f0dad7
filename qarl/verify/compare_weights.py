"""Compare a trainer's weights with an engine's, layer by layer.

Axes: O output rows, I input columns, Q quantization groups.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme

from qarl.configs.words import few
from qarl.quant.materialize import LowBitWeight
from qarl.quant.schemes import is_protected
from qarl.verify.compare_experts import LEAVES as EXPERT_LEAVES
from qarl.verify.compare_experts import compare_experts
from qarl.verify.differences import Sketch, diagnose, distance, incomparable, sketch
from qarl.verify.engines import HeldExperts
from qarl.verify.findings import Cause, Report, VerifyInputError, fault
from qarl.verify.lines import outcome_lines, wrapped
from qarl.verify.quantization import (
    CODES,
    Quantization,
    dequantized,
    describe,
    nearest,
    rounded,
    same,
)
from qarl.verify.sides import Side, open_side, read_quantization

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
_OF_CODES = ("weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx")
_UNSEEN = ("input_global_scale", "input_scale")
"""Tensors of activations, which a trainer's masters do not have."""
_HEAD = "lm_head"
_EMBEDDING = "model.embed_tokens"
_ULP = 2.0**-8
"""Relative spacing of bfloat16."""


@dataclass(frozen=True)
class LayerResult:
    """The comparison of one layer."""

    name: str
    """Its name, as transformers has it."""
    state: str
    """Agreement, one of docs/guide/verify.md's states, or "different"."""
    engine_scheme: str
    """How the engine holds it."""


@dataclass(frozen=True)
class WeightsReport(Report):
    """Outcome of a comparison of weights."""

    compared: ClassVar[str] = "weights"

    layers: tuple[LayerResult, ...]
    """Every layer that both sides have, in the trainer's order."""

    def lines(self, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` characters."""
        schemes = Counter(layer.engine_scheme for layer in self.layers)
        states = Counter(layer.state for layer in self.layers)
        by_scheme = ", ".join(f"{count} {scheme}" for scheme, count in schemes.most_common())
        lines = wrapped(f"{len(self.layers)} layers compared; the engine holds: ", by_scheme, width)
        lines += [f"  {count:>6}  {state}" for state, count in states.most_common()]
        return lines + outcome_lines(self, width)


def weights(
    trainer: Any, engine: Any, config: str | Path | Mapping[str, Any] | None = None
) -> WeightsReport:
    """Compare a trainer's weights with an engine's.

    Each of the two is a checkpoint folder (masters, fake-quantized weights or compressed-tensors'
    codes), a mapping of named tensors, a module, vLLM's `LLM` in this process, or the URL of a vLLM
    server that has the worker extension `qarl.verify.HeldWeights`.

    Args:
        trainer: What is trained.
        engine: What samples.
        config: The quantization that the trainer means, if its checkpoint does not say so: a
            `quantization_config`, or a JSON file with one.

    Raises:
        VerifyInputError: A side is of another kind, or its names or formats are unknown.
        ModelError: A folder is no checkpoint, or a file in it is cut short.
    """
    meant = None
    if isinstance(config, Mapping):
        meant = Quantization.parse(config, "config")
    elif config is not None:
        meant = read_quantization(config)
    ours = open_side(trainer, "trainer", meant, engine)
    theirs = open_side(engine, "engine", None, trainer)
    if not ours.layers.keys() & theirs.layers.keys():
        raise VerifyInputError(
            f"no layer has the same name on both sides: the trainer has {few(list(ours.layers))},"
            f" the engine {few(list(theirs.layers))}; rename one of them"
        )
    return _Comparison(ours, theirs).report()


class _Comparison:
    """One comparison: layers first, causes of the differing ones after all have been seen."""

    def __init__(self, trainer: Side, engine: Side):
        self._trainer = trainer
        self._engine = engine
        self._causes: list[Cause] = []
        self._unchecked: list[str] = [*trainer.unread, *engine.unread]
        self._sketches: dict[str, Sketch] = {}
        self._different: list[str] = []
        """Layers whose values differ."""

    def report(self) -> WeightsReport:
        """Compare everything."""
        self._causes += _settings(self._trainer, self._engine)
        self._causes += _missing(self._trainer, self._engine)
        names = [name for name in self._trainer.layers if name in self._engine.layers]
        results = [
            LayerResult(name, self._layer(name), describe(_stored_scheme(self._engine, name)))
            for name in names
        ]
        results += [result for experts in self._engine.experts for result in self._experts(experts)]
        self._causes += _tied(self._trainer, self._engine)
        for name in self._different:
            self._causes.append(self._diagnosed(name))
        self._say_unknown()
        self._engine.check()
        merged = _merged(self._causes)
        return WeightsReport(
            causes=tuple(sorted(merged, key=lambda cause: cause.level != "fault")),
            unchecked=tuple(dict.fromkeys(self._unchecked)),
            layers=tuple(results),
        )

    def _say_unknown(self) -> None:
        codes = any(_has_codes(self._engine, name) for name in self._engine.layers)
        if self._trainer.quantization is None and (codes or self._engine.quantization):
            self._unchecked.append(
                "which layers the trainer quantizes, and how: it does not say; give --config"
            )
            self._causes += _uneven(self._engine)
        quantization = self._engine.quantization
        groups = () if quantization is None else quantization.config.config_groups.values()
        if any(isinstance(g, QuantizationScheme) and g.input_activations for g in groups):
            self._unchecked.append(
                "activations: their codes are made while the engine runs; `qarl verify logprobs`"
                " sees them"
            )

    def _layer(self, name: str) -> str:
        """Compare one layer and return its state."""
        cause = _declared(self._trainer, self._engine, name)
        if cause is not None:
            self._causes.append(cause)
        ours = self._trainer.read(name)
        theirs = self._engine.read(name)
        for side, tensors in ((self._trainer, ours), (self._engine, theirs)):
            problem = _broken_codes(side, name, tensors)
            if problem is not None:
                self._causes.append(problem)
                return "different"
        state = self._values(name, ours, theirs)
        for leaf in sorted(ours.keys() | theirs.keys()):
            if leaf == "weight" or leaf in (*CODES, *_OF_CODES, *_UNSEEN):
                continue
            if leaf not in ours or leaf not in theirs:
                only = "trainer" if leaf in ours else "engine"
                self._causes.append(fault("missing", f"{name}.{leaf}", f"the {only} alone has it"))
                state = "different"
            elif not _rounds_to(ours[leaf], theirs[leaf]):
                self._causes.append(_leaf_cause(f"{name}.{leaf}", ours[leaf], theirs[leaf]))
                state = "different"
        return state

    def _experts(self, experts: HeldExperts) -> Iterator[LayerResult]:
        """Yield the results of a running engine's experts of one layer."""
        quantization = self._engine.quantization
        scheme = quantization and quantization.scheme(f"{experts.name}.0.{EXPERT_LEAVES[0]}")
        inputs = scheme is not None and scheme.input_activations is not None
        try:
            compared = list(
                compare_experts(
                    experts,
                    self._trainer,
                    lambda name: self._expected(name, scheme or None),
                    inputs,
                )
            )
        except KeyError:
            self._unchecked.append(
                f"the engine's experts {experts.name!r}: the trainer names no such experts"
            )
            return
        for name, state, cause in compared:
            self._causes += [] if cause is None else [cause]
            yield LayerResult(name, state, describe(scheme or None))

    def _expected(self, name: str, scheme: QuantizationScheme | None) -> torch.Tensor | None:
        """Return the trainer's weight of a layer, fp32 [O, I]; None if it has none.

        Masters are rounded to codes by the engine's scheme first.
        """
        if name not in self._trainer.layers:
            return None
        tensors = self._trainer.read(name)
        value = _value(self._trainer, name, tensors)
        if value is None or scheme is None or _stored_scheme(self._trainer, name) is not None:
            return None if value is None else value.float()
        codes = rounded(value, scheme, torch.bfloat16, name)
        return value.float() if codes is None else codes.dequantized().float()

    def _values(
        self, name: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
    ) -> str:
        """Compare the weights of a layer and return its state."""
        b = _value(self._engine, name, theirs)
        if b is None:
            return "no weight"
        if b.ndim == 2:
            self._sketches[name] = sketch(b)
        a = _value(self._trainer, name, ours)
        if a is None:
            return "no weight"
        state = _state(self._trainer, self._engine, name, ours, theirs, a, b)
        if state == "different":
            self._different.append(name)
        return state

    def _diagnosed(self, name: str) -> Cause:
        """Return why a layer's values differ, reading it again."""
        ours = self._trainer.read(name)
        theirs = self._engine.read(name)
        other_scales = _other_scales(name, ours, theirs)
        if other_scales is not None:
            return other_scales
        a = _value(self._trainer, name, ours)
        b = _value(self._engine, name, theirs)
        assert a is not None
        assert b is not None
        scheme = _scheme_between(self._trainer, self._engine, name, ours, theirs)
        rounding = 0.0
        off = ""
        if scheme is not None and a.ndim == 2:
            codes = rounded(a, scheme, _scale_dtype(theirs), name)
            near = nearest(a, theirs, scheme) if a.shape == b.shape else None
            estimate = codes.dequantized() if codes is not None else near
            rounding = 0.0 if estimate is None else distance(a, estimate)
            if near is not None:
                off = f"; {_off(a, b, near, a.dtype):.2%} of codes are not the nearest"
        return diagnose(
            layer=name,
            trainer=a.float(),
            engine=b.float(),
            rounding=rounding,
            engine_sketches=self._sketches,
            config=self._trainer.config,
            off=off,
        )


def _leaf_cause(name: str, trainer: torch.Tensor, engine: torch.Tensor) -> Cause:
    """Return why a layer's tensor besides its weight differs, such as a bias."""
    cause = incomparable(name, trainer.float(), engine.float())
    if cause is not None:
        return cause
    return fault("stale", name, f"‖Δ‖ is {distance(trainer, engine):.2g} of ‖W‖")


def _has_codes(side: Side, layer: str) -> bool:
    if side.effective:
        quantization = side.quantization
        if quantization is None or not _is_linear(side, layer):
            return False
        return quantization.scheme(layer) is not None
    return any(leaf in side.layers[layer] for leaf in CODES)


def _is_linear(side: Side, layer: str) -> bool:
    """Return whether a layer multiplies by a matrix."""
    tensors = side.layers[layer]
    weight = tensors.get("weight")
    matrix = "weight_packed" in tensors or (weight is not None and len(weight.shape) == 2)
    return matrix and not layer.endswith("embed_tokens")


def _stored_scheme(side: Side, layer: str) -> QuantizationScheme | None:
    """Return the scheme of a layer's codes; None if it has none."""
    if side.quantization is None or not _has_codes(side, layer):
        return None
    return side.quantization.scheme(layer)


def _scheme_between(
    trainer: Side,
    engine: Side,
    layer: str,
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
) -> QuantizationScheme | None:
    """Return the scheme by whose rounding a layer's values may differ; None if by none."""
    mine, other = _stored_scheme(trainer, layer), _stored_scheme(engine, layer)
    return None if same(mine, other) else other or mine


def _scale_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    scale = tensors.get("weight_scale")
    if scale is None or scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return torch.bfloat16
    return scale.dtype


def _value(
    side: Side,
    layer: str,
    tensors: dict[str, torch.Tensor],
) -> torch.Tensor | None:
    """Return a layer's weight in 16 or 32 bits, codes dequantized; None if it has none."""
    scheme = _stored_scheme(side, layer)
    if side.effective or scheme is None:
        return tensors.get("weight")
    assert side.quantization is not None
    return dequantized(tensors, scheme, side.quantization.config)


def _state(
    trainer: Side,
    engine: Side,
    layer: str,
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
) -> str:
    """Return in which way the values a of the trainer and b of the engine agree, or "different"."""
    if a.shape != b.shape or not all(values.isfinite().all() for values in (a, b)):
        return "different"
    mine = _stored_scheme(trainer, layer)
    other = _stored_scheme(engine, layer)
    if mine is not None and other is not None and not engine.effective:
        if _same_bytes(ours, theirs):
            return "equal codes and scales"
        return "equal values of other codes" if torch.equal(a, b) else "different"
    if mine is not None:
        return "the trainer's codes, dequantized" if _rounds_to(a, b) else "different"
    if other is None:
        if torch.equal(a, b):
            return "equal"
        return "equal after a cast" if _rounds_to(a, b) else "different"
    return _masters(layer, a, b, theirs, other, engine.effective)


def _masters(
    layer: str,
    master: torch.Tensor,
    values: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    scheme: QuantizationScheme,
    effective: bool,
) -> str:
    """Return how masters [O, I] and the values of an engine's codes agree, or "different"."""
    others = (dtype for dtype in (torch.bfloat16, torch.float16) if dtype != master.dtype)
    casts = [master, *map(master.to, others)]
    stored_as = (_scale_dtype(tensors),)
    if effective:
        stored_as = (torch.bfloat16, torch.float16, torch.float32)
    for cast, dtype in product(casts, stored_as):
        codes = rounded(cast, scheme, dtype, layer)
        if codes is None:
            continue
        if effective:
            if _rounds_to(codes.dequantized(), values):
                return "codes of these masters, as the engine multiplies"
            continue
        if _same_codes(codes, tensors):
            return "codes of these masters, bit for bit"
    if _rounds_to(master, values):
        return "fake-quantized values"
    if effective:
        return "different"
    for cast in casts:
        near = nearest(cast, tensors, scheme)
        if near is not None and not _off(cast, values, near, master.dtype):
            return "nearest codes under other scales"
    return "different"


def _same_codes(codes: LowBitWeight, tensors: dict[str, torch.Tensor]) -> bool:
    """Return whether a checkpoint's tensors are these codes and scales, bit for bit.

    A checkpoint may store one code an element ("weight") where ours packs them.
    """
    stored = dict(codes.tensors())
    if "weight" in tensors and "weight" not in stored:
        del stored["weight_packed"]
        stored["weight"] = codes.unpacked().to(tensors["weight"].dtype)
    compared = stored.keys() & tensors.keys()
    if not compared & {"weight", "weight_packed"}:
        return False
    return all(torch.equal(stored[name], tensors[name]) for name in compared)


def _off(
    master: torch.Tensor, values: torch.Tensor, near: torch.Tensor, dtype: torch.dtype
) -> float:
    """Return the fraction of codes that are not the nearest to a master.

    A 16-bit master may have been rounded from the one that was quantized.
    """
    exact = master.float()
    slack = exact.abs() * (1e-5 if dtype == torch.float32 else _ULP / 2 + 1e-5)
    largest = (exact - near).abs() * (1 + 1e-5) + slack
    within = (exact - values).abs() <= largest
    return 1 - float(within.float().mean())  # a NaN is not within


def _rounds_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal after a cast of one to the other's dtype, or differ by
    a rounding to the coarser of their dtypes at most. Whole numbers are roundings of none.
    """
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point():
        return False
    for cast, exact in ((one, other), (other, one)):
        if torch.equal(cast.to(exact.dtype), exact):
            return True
    coarse = {torch.bfloat16: _ULP, torch.float16: _ULP / 8}
    relative = max(coarse.get(side.dtype, 1e-6) for side in (one, other))
    a = one.float()
    b = other.float()
    gap = (a - b).abs()
    # An infinity is no rounding, though the bound would be infinite, too.
    within = (gap <= relative * torch.maximum(a.abs(), b.abs())) & gap.isfinite()
    return bool(within.all())


def _same_bytes(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
) -> bool:
    names = (ours.keys() | theirs.keys()) & {*CODES, "weight", *_OF_CODES}
    return all(
        name in ours
        and name in theirs
        and ours[name].dtype == theirs[name].dtype
        and torch.equal(ours[name], theirs[name])
        for name in names
    )


def _other_scales(
    layer: str, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> Cause | None:
    """Return the cause if two layers have equal codes under scales that one side rounded to another
    dtype.
    """
    names = {"weight", "weight_packed"} & (ours.keys() | theirs.keys())
    scales = [side.get("weight_scale") for side in (ours, theirs)]
    mine, other = scales
    if mine is None or other is None or mine.dtype == other.dtype:
        return None
    for name in names:
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name]):
            return None
    if not (torch.equal(mine.to(other.dtype), other) or torch.equal(other.to(mine.dtype), mine)):
        return None
    largest = float(((mine.float() - other.float()).abs() / mine.float().abs()).nan_to_num().max())
    kinds = [str(scale.dtype).removeprefix("torch.") for scale in (mine, other)]
    return fault(
        "scales",
        layer,
        f"the codes are equal, and one side rounded their scales to another dtype: {kinds[0]}"
        f" (trainer), {kinds[1]} (engine), up to {largest:.2g} apart",
        "round scales to the engine's dtype before weights are rounded to codes by them",
    )


def _broken_codes(
    side: Side,
    layer: str,
    tensors: dict[str, torch.Tensor],
) -> Cause | None:
    """Return the cause if a layer's codes do not have the shapes that its scheme gives them."""
    if side.effective or not _has_codes(side, layer):
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


def _declared(trainer: Side, engine: Side, layer: str) -> Cause | None:
    """Return the cause if the two sides mean to quantize a layer differently, or one does not hold
    what it means to.
    """
    if not _is_linear(engine, layer) and not _has_codes(engine, layer):
        return None
    quantization = engine.quantization
    if quantization is not None and not engine.effective and not _has_codes(engine, layer):
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
    other = _stored_scheme(engine, layer)
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
    if layer.endswith((_HEAD, "embed_tokens")):
        kind = "output head" if layer.endswith(_HEAD) else "embedding"
    return fault(
        "protected",
        layer,
        f"the engine's {kind} is quantized ({describe(scheme)})",
        "add it to the engine's ignore list: re:.*mlp\\.gate$, lm_head",
    )


def _uneven(engine: Side) -> Iterator[Cause]:
    """Yield a note on layers without codes whose namesakes in other decoder layers have them."""
    kinds: dict[str, dict[bool, list[str]]] = {}
    for layer in engine.layers:
        if _is_linear(engine, layer):
            kind = ".".join(part for part in layer.split(".") if not part.isdigit())
            kinds.setdefault(kind, {}).setdefault(_has_codes(engine, layer), []).append(layer)
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


def _settings(trainer: Side, engine: Side) -> Iterator[Cause]:
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


def _missing(trainer: Side, engine: Side) -> Iterator[Cause]:
    """Yield a cause for layers that one side alone has."""
    for side, other in ((trainer, engine), (engine, trainer)):
        alone = [
            name for name in side.layers if name not in other.layers and not name.endswith(_HEAD)
        ]
        if alone and not other.effective:
            yield Cause(
                name="missing",
                level="fault",
                evidence=f"{len(alone)} layers are the {side.role}'s alone",
                remedy="publish all tensors, by transformers' names",
                about=tuple(alone),
            )


def _tied(trainer: Side, engine: Side) -> Iterator[Cause]:
    """Yield a cause if an output head that is the embedding on one side is not on the other."""
    if _EMBEDDING not in trainer.layers or _EMBEDDING not in engine.layers:
        return
    for side, other in ((trainer, engine), (engine, trainer)):
        if _HEAD in side.layers or _HEAD not in other.layers:
            continue
        if "weight" not in other.layers[_HEAD]:
            continue
        embedding = side.read(_EMBEDDING)["weight"]
        head = other.read(_HEAD)["weight"]
        trainers, engines = (embedding, head) if side is trainer else (head, embedding)
        cause = incomparable(_HEAD, trainers, engines)
        if cause is not None:
            yield cause
        elif not _rounds_to(embedding, head):
            yield fault(
                "tied",
                _HEAD,
                f"the {side.role} ties its output head to the embedding, and the {other.role}'s"
                f" head differs from it (‖Δ‖ is {distance(embedding, head):.2g} of ‖W‖)",
                "publish the embedding as lm_head too, or tie both",
            )


def _merged(causes: list[Cause]) -> list[Cause]:
    """Return causes with those of the same name, remedy and level joined, the first's evidence
    standing for all.
    """
    groups: dict[tuple[str, str, str], list[Cause]] = {}
    for cause in causes:
        text = cause.evidence if cause.name in ("settings", "uneven") else ""
        groups.setdefault((cause.name, cause.level, cause.remedy + text), []).append(cause)
    return [
        Cause(
            name=same_kind[0].name,
            level=same_kind[0].level,
            evidence=same_kind[0].evidence
            + (f" (the first of {len(same_kind)})" if len(same_kind) > 1 else ""),
            remedy=same_kind[0].remedy,
            about=tuple(name for cause in same_kind for name in cause.about),
        )
        for same_kind in groups.values()
    ]
