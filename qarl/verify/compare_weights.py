"""Compare a trainer's weights with an engine's, layer by layer.

Axes: O output rows, I input columns, Q quantization groups.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme

from qarl.configs.words import few
from qarl.verify.agreement import (
    BESIDE_CODES,
    agreement,
    fraction_off,
    other_scales,
    rounds_to,
    scale_dtype,
)
from qarl.verify.compare_experts import LEAVES as EXPERT_LEAVES
from qarl.verify.compare_experts import compare_experts
from qarl.verify.declarations import (
    broken_codes,
    declared_differently,
    differing_settings,
    missing_layers,
    uneven_layers,
)
from qarl.verify.differences import Sketch, diagnose, distance, incomparable, sketch
from qarl.verify.engines import HeldExperts
from qarl.verify.findings import Cause, Report, VerifyInputError, fault
from qarl.verify.lines import outcome_lines, wrapped
from qarl.verify.names import EMBEDDING, HEAD
from qarl.verify.quantization import CODES, Quantization, describe, nearest, rounded, same
from qarl.verify.sides import Side, open_side, read_quantization

_SPEAKS_FOR_ALL = ("settings", "uneven", "missing")
"""Names of causes whose evidence is a setting, a count, or the side that alone has something."""
_UNSEEN = ("input_global_scale", "input_scale")
"""Tensors of activations, which a trainer's masters do not have."""


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
        self._causes += differing_settings(self._trainer, self._engine)
        self._causes += missing_layers(self._trainer, self._engine)
        names = [name for name in self._trainer.layers if name in self._engine.layers]
        results = [
            LayerResult(name, self._layer(name), describe(self._engine.stored_scheme(name)))
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
        codes = any(self._engine.has_codes(name) for name in self._engine.layers)
        if self._trainer.quantization is None and (codes or self._engine.quantization):
            self._unchecked.append(
                "which layers the trainer quantizes, and how: it does not say; give --config"
            )
            self._causes += uneven_layers(self._engine)
        quantization = self._engine.quantization
        groups = () if quantization is None else quantization.config.config_groups.values()
        if any(isinstance(g, QuantizationScheme) and g.input_activations for g in groups):
            self._unchecked.append(
                "activations: their codes are made while the engine runs; `qarl verify logprobs`"
                " sees them"
            )

    def _layer(self, name: str) -> str:
        """Compare one layer and return its state."""
        cause = declared_differently(self._trainer, self._engine, name)
        if cause is not None:
            self._causes.append(cause)
        ours = self._trainer.read(name)
        theirs = self._engine.read(name)
        for side, tensors in ((self._trainer, ours), (self._engine, theirs)):
            problem = broken_codes(side, name, tensors)
            if problem is not None:
                self._causes.append(problem)
                return "different"
        state = self._values(name, ours, theirs)
        for leaf in sorted(ours.keys() | theirs.keys()):
            if leaf == "weight" or leaf in (*CODES, *BESIDE_CODES, *_UNSEEN):
                continue
            if leaf not in ours or leaf not in theirs:
                only = "trainer" if leaf in ours else "engine"
                self._causes.append(fault("missing", f"{name}.{leaf}", f"the {only} alone has it"))
                state = "different"
            elif not rounds_to(ours[leaf], theirs[leaf]):
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
        value = self._trainer.weight(name, tensors)
        if value is None or scheme is None or self._trainer.stored_scheme(name) is not None:
            return None if value is None else value.float()
        codes = rounded(value, scheme, torch.bfloat16, name)
        return value.float() if codes is None else codes.dequantized().float()

    def _values(
        self, name: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
    ) -> str:
        """Compare the weights of a layer and return its state."""
        b = self._engine.weight(name, theirs)
        if b is None:
            return "no weight"
        if b.ndim == 2:
            self._sketches[name] = sketch(b)
        a = self._trainer.weight(name, ours)
        if a is None:
            return "no weight"
        state = agreement(self._trainer, self._engine, name, ours, theirs, a, b)
        if state == "different":
            self._different.append(name)
        return state

    def _diagnosed(self, name: str) -> Cause:
        """Return why a layer's values differ, reading it again."""
        ours = self._trainer.read(name)
        theirs = self._engine.read(name)
        scales = other_scales(name, ours, theirs)
        if scales is not None:
            return scales
        a = self._trainer.weight(name, ours)
        b = self._engine.weight(name, theirs)
        assert a is not None
        assert b is not None
        scheme = _scheme_between(self._trainer, self._engine, name)
        rounding = 0.0
        off = ""
        if scheme is not None and a.ndim == 2:
            codes = rounded(a, scheme, scale_dtype(theirs), name)
            near = nearest(a, theirs, scheme) if a.shape == b.shape else None
            estimate = codes.dequantized() if codes is not None else near
            rounding = 0.0 if estimate is None else distance(a, estimate)
            if near is not None:
                off = f"; {fraction_off(a, b, near, a.dtype):.2%} of codes are not the nearest"
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


def _scheme_between(trainer: Side, engine: Side, layer: str) -> QuantizationScheme | None:
    """Return the scheme by whose rounding a layer's values may differ; None if by none."""
    mine, other = trainer.stored_scheme(layer), engine.stored_scheme(layer)
    return None if same(mine, other) else other or mine


def _tied(trainer: Side, engine: Side) -> Iterator[Cause]:
    """Yield a cause if an output head that is the embedding on one side is not on the other."""
    if EMBEDDING not in trainer.layers or EMBEDDING not in engine.layers:
        return
    for side, other in ((trainer, engine), (engine, trainer)):
        if HEAD in side.layers or HEAD not in other.layers:
            continue
        if "weight" not in other.layers[HEAD]:
            continue
        embedding = side.read(EMBEDDING)["weight"]
        head = other.read(HEAD)["weight"]
        trainers, engines = (embedding, head) if side is trainer else (head, embedding)
        cause = incomparable(HEAD, trainers, engines)
        if cause is not None:
            yield cause
        elif not rounds_to(embedding, head):
            yield fault(
                "tied",
                HEAD,
                f"the {side.role} ties its output head to the embedding, and the {other.role}'s"
                f" head differs from it (‖Δ‖ is {distance(embedding, head):.2g} of ‖W‖)",
                "publish the embedding as lm_head too, or tie both",
            )


def _merged(causes: list[Cause]) -> list[Cause]:
    """Return causes with those of the same name, remedy and level joined, the first's evidence
    standing for all.

    Those whose evidence is about all that they name are joined only with the same evidence.
    """
    groups: dict[tuple[str, str, str], list[Cause]] = {}
    for cause in causes:
        text = cause.evidence if cause.name in _SPEAKS_FOR_ALL else ""
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
