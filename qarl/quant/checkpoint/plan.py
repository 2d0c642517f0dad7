"""The scheme of each layer: a main scheme and ordered rules, resolved against layer names.

Everything that quantizes, publishes, audits or exports reads the plan. The plan also writes the
`quantization_config` from which the engine resolves its layers. Errors are found here, before
anything is loaded or changed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qarl.configs.schema.run import LayerRule
from qarl.quant.checkpoint.families import STACKED
from qarl.quant.checkpoint.patterns import matching, nearest_names
from qarl.quant.schemes import (
    Scheme,
    SchemeError,
    get_scheme,
    is_protected,
    write_quantization_config,
)

_EXPERT = re.compile(r"(.+\.experts)\.\d+\.[^.]+$")
_MAMBA = re.compile(r"(.+)\.layers\.(\d+)\.mamba\.(.+)")
_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class LayerPlan:
    """The scheme and the shape of every linear layer."""

    main: Scheme
    """Scheme of the layers that no rule matches."""
    schemes: Mapping[str, Scheme] = field(repr=False)
    """Checkpoint name → scheme, in the model's order; `bf16` for a layer in the compute dtype."""
    shapes: Mapping[str, tuple[int, int]] = field(repr=False)
    """Checkpoint name → (O, I) of the weight, in the model's order."""
    beside: tuple[str, ...] = ()
    """Patterns of names of parts beside the model, which no scheme quantizes, as config.json lists
    them.
    """

    @property
    def ignored(self) -> list[str]:
        """Layers in the compute dtype, in the model's order."""
        return [layer for layer, scheme in self.schemes.items() if scheme.quantization is None]

    @property
    def quantized(self) -> dict[str, list[str]]:
        """Scheme name → its layers, the main scheme first, then in order of appearance."""
        by_scheme: dict[str, list[str]] = {self.main.name: []}
        for layer, scheme in self.schemes.items():
            if scheme.quantization is not None:
                by_scheme.setdefault(scheme.name, []).append(layer)
        return {name: layers for name, layers in by_scheme.items() if layers}

    def quantization_config(self, kv_cache: str | None = None) -> dict[str, Any] | None:
        """Return the `quantization_config` for config.json; None if nothing is quantized.

        There is one group for each scheme, the main scheme's first. `ignore` holds exactly the
        layers in the compute dtype, and the parts beside the model.

        If only the main scheme is used, its group targets every "Linear", and a quantized output
        head by name, because vLLM's is no "Linear". If schemes are mixed, every group names its
        layers, so that readers need no rule of precedence (transformers' optimized FP8 loading has
        none and takes whatever "Linear" matches).

        Args:
            kv_cache: "fp8" (e4m3), or None.
        """
        depth = 1 + max(map(_layer_number, self.schemes), default=0)
        targets = {name: config_names(layers, depth) for name, layers in self.quantized.items()}
        if list(targets) == [self.main.name]:
            heads = filter(is_protected, targets[self.main.name])
            targets = {self.main.name: ["Linear", *heads]}
        groups = [(get_scheme(name), names) for name, names in targets.items()]
        ignored = [*config_names(self.ignored, depth), *self.beside]
        return write_quantization_config(groups, ignored, kv_cache)


def make_plan(
    main: Scheme,
    rules: Sequence[LayerRule],
    shapes: Mapping[str, tuple[int, int]],
    fixed: Mapping[str, str],
) -> LayerPlan:
    """Resolve rules against a model; the first rule that matches a layer decides.

    Raises `SchemeError` for a rule that matches nothing or whose layers all match earlier rules, a
    rule that would quantize a protected layer, and for layers that the engine multiplies as one but
    that would take different schemes.

    Args:
        main: scheme of layers that no rule matches.
        rules: rules in order.
        shapes: checkpoint name → (O, I) of each linear layer, in the model's order.
        fixed: name → why no scheme can quantize it. Embeddings are only in this argument.
    """
    names = list(dict.fromkeys([*shapes, *fixed]))
    taken = _apply(rules, names)
    for layer, rule in taken.items():
        _refuse_protected(rule, layer, fixed)
    unquantized = get_scheme("bf16")
    schemes = {}
    for layer in shapes:
        default = unquantized if layer in fixed or main.leaves_alone(layer) else main
        schemes[layer] = get_scheme(taken[layer].scheme) if layer in taken else default
    _refuse_split(schemes, taken)
    used = {scheme.name for scheme in schemes.values()}
    if main.quantization is not None and main.name not in used:
        why = (
            "; the rules take them all, so give the scheme of most layers as `scheme`"
            if taken
            else ", nor experts of a known layout: take scheme 'bf16', or another model"
        )
        raise SchemeError(
            f"scheme {main.name!r} quantizes none of the model's {len(shapes)} linear layers{why}"
        )
    return LayerPlan(main=main, schemes=schemes, shapes=shapes)


def config_names(layers: Iterable[str], depth: int) -> list[str]:
    """Return layer names as config.json lists them, sorted.

    All experts of a layer become one anchored pattern, because a model has thousands of experts,
    and readers compare every module with every entry. vLLM 0.32 asks by other names for the layers
    that checkpoints call "mamba", so they have several: Granite-4-H's are "mixer" there, and
    Falcon-H1's are also counted from the number of decoder layers on.

    layers: checkpoint names. depth: number of decoder layers.
    """
    names = set()
    for layer in layers:
        expert = _EXPERT.match(layer)
        names.add(rf"re:{re.escape(expert[1])}\.\d+\.[^.]+$" if expert else layer)
        mamba = _MAMBA.fullmatch(layer)
        if mamba:
            names.add(f"{mamba[1]}.layers.{mamba[2]}.mixer.{mamba[3]}")
            names.add(f"{mamba[1]}.{depth + int(mamba[2])}.mixer.{mamba[3]}")
    return sorted(names)


def _layer_number(name: str) -> int:
    """Return the number of the decoder layer in a layer's name, from 0; -1 if it has none."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else -1


def _apply(rules: Sequence[LayerRule], names: Sequence[str]) -> dict[str, LayerRule]:
    """Return layer → the first rule that matches it."""
    taken: dict[str, LayerRule] = {}
    for rule in rules:
        scheme = get_scheme(rule.scheme)
        matched = matching(rule.match, names)
        # A range of decoder layers leaves out the layers that its scheme protects.
        if rule.match.startswith(("first:", "last:")):
            matched = [
                name
                for name in matched
                if scheme.quantization is None or not scheme.leaves_alone(name)
            ]
        if not matched:
            raise SchemeError(
                f"layer rule '{rule}' matches no layer of the model;"
                f" {nearest_names(rule.match, names)}"
            )
        new = [name for name in matched if name not in taken]
        if not new:
            earlier = ", ".join(f"'{r}'" for r in dict.fromkeys(taken[name] for name in matched))
            raise SchemeError(
                f"layer rule '{rule}' changes nothing: the first rule that matches decides, and"
                f" {earlier} comes before it for all {len(matched)} layers it matches; move it"
                " forward or remove it"
            )
        taken.update(dict.fromkeys(new, rule))
    return taken


def _refuse_protected(rule: LayerRule, layer: str, fixed: Mapping[str, str]) -> None:
    """Raise `SchemeError` if the rule would quantize a layer that it may not."""
    scheme = get_scheme(rule.scheme)
    if scheme.quantization is None:
        return
    remedy = (
        f"put a rule before it that leaves the layer alone ('{layer}=bf16'), or match fewer layers"
    )
    if layer in fixed:
        raise SchemeError(
            f"layer rule '{rule}' would quantize {layer!r}, which cannot be: {fixed[layer]};"
            f" {remedy}"
        )
    if scheme.leaves_alone(layer) and rule.match != layer:
        raise SchemeError(
            f"layer rule '{rule}' would quantize {layer!r}; output heads, embeddings, routers and"
            " gates of delta nets are quantized only where a rule names them exactly"
            f" ('{layer}={rule.scheme}'); {remedy}"
        )


def _refuse_split(schemes: Mapping[str, Scheme], taken: Mapping[str, LayerRule]) -> None:
    """Raise `SchemeError` if layers that the engine multiplies as one would differ in scheme."""
    groups: dict[str, list[str]] = {}
    for layer in schemes:
        groups.setdefault(stacked_name(layer), []).append(layer)
    for fused, parts in groups.items():
        first: dict[str, str] = {}  # scheme → the first layer that takes it
        for part in parts:
            first.setdefault(schemes[part].name, part)
        if len(first) > 1:
            rule_of = {part: f"rule '{rule}'" for part, rule in taken.items()}
            clash = ", ".join(
                f"{part!r} takes {name!r} by {rule_of.get(part, 'no rule')}"
                for name, part in first.items()
            )
            endings = dict.fromkeys(part.rpartition(".")[2] for part in parts)
            leaves = "|".join(map(re.escape, endings))
            raise SchemeError(
                f"the engine multiplies {fused!r} as one, so its {len(parts)} layers need one"
                f" scheme, but {clash}; "
                rf"match all of them (for example re:.*\.({leaves})$) or none"
            )


def stacked_name(layer: str) -> str:
    """Return the engine's name of the module this layer is part of; its own name if it is alone."""
    expert = _EXPERT.match(layer)
    if expert:
        return expert[1]
    parent, _, leaf = layer.rpartition(".")
    return next(
        (f"{parent}.{stack}" for stack, parts in STACKED.items() if leaf in parts),
        layer,
    )
