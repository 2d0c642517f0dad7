"""A model's matrices by name, for what names some of them: layer rules and LoRA's targets.

Names are those of Llama, Qwen and their mixtures; a rule that names others (Mixtral's `w1`) counts as none.
"""

from collections.abc import Iterator, Sequence

from qarl.configs.schema.run import LayerRule
from qarl.plan.shapes import Shapes
from qarl.quant.checkpoint.patterns import matching

Matrix = tuple[int, int]
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def matrices(shapes: Shapes) -> Iterator[tuple[str, Matrix]]:
    """(checkpoint name, (O, I)) of every matrix that can be quantized."""
    for layer in range(shapes.layers):
        place = f"model.layers.{layer}"
        for leaf, shape in zip(_ATTENTION, shapes.attention_matrices, strict=True):
            yield f"{place}.self_attn.{leaf}", shape
        modules = [f"mlp.experts.{expert}" for expert in range(shapes.experts)] or ["mlp"]
        for module in modules:
            for leaf, shape in zip(_MLP, shapes.mlp_matrices, strict=True):
                yield f"{place}.{module}.{leaf}", shape


def schemes_of(shapes: Shapes, scheme: str, rules: Sequence[LayerRule]) -> Iterator[tuple[str, Matrix]]:
    """(scheme's name, (O, I)) of every matrix; the first rule that matches wins."""
    sizes = dict(matrices(shapes))
    taken = dict.fromkeys(sizes, scheme)
    for rule in reversed(rules):
        taken |= dict.fromkeys(matching(rule.match, list(sizes)), rule.scheme)
    return ((taken[name], shape) for name, shape in sizes.items())


def targeted(shapes: Shapes, patterns: Sequence[str]) -> Iterator[Matrix]:
    """(O, I) of the matrices that get an adapter, all where no pattern is given; an expert's gate and up as one."""
    sizes = dict(matrices(shapes))
    chosen = set(sizes) if not patterns else {name for pattern in patterns for name in matching(pattern, list(sizes))}
    for name, (rows, columns) in sizes.items():
        if name in chosen and not (shapes.experts and name.endswith(".up_proj")):
            merged = shapes.experts and name.endswith(".gate_proj")
            yield (2 * rows if merged else rows), columns
