"""Why two values of a layer differ: hypotheses, each tried on the values.

A hypothesis is a change T of the engine's tensor B that would make it the trainer's A. It holds if
‖A − T(B)‖ is what rounding explains, and far below ‖A − B‖. Tensors of other names are compared by
sketches, a few random projections each, so that one pass over the files is enough.

Axes: O output rows, I input columns, H heads.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qarl.verify.findings import Cause, fault

_SKETCH = 6
"""Projections of rows and of columns; a sketch is a matrix [_SKETCH, _SKETCH]."""
_LARGEST = 8192
"""Rows up to which a permutation is looked for."""
_BLOCK = re.compile(r"(.*\.)?(?P<kind>layers|h|blocks)\.(?P<number>\d+)\.(?P<rest>.+)$")
_EXPERT = re.compile(r"(?P<before>.+\.experts)\.(?P<number>\d+)\.(?P<leaf>.+)$")
_SIBLINGS = {
    frozenset({"gate_proj", "up_proj"}): "gate and up projections are exchanged",
    frozenset({"q_proj", "k_proj"}): "q and k are exchanged",
    frozenset({"k_proj", "v_proj"}): "k and v are exchanged",
    frozenset({"q_proj", "v_proj"}): "q and v are exchanged",
}


@dataclass(frozen=True)
class Sketch:
    """A tensor's shape and random projections of it."""

    shape: tuple[int, ...]
    """(O, I)."""
    values: torch.Tensor
    """R · A · C, fp32 [_SKETCH, _SKETCH]."""


def sketch(values: torch.Tensor) -> Sketch:
    """Return the sketch of a matrix [O, I]. Equal shapes are projected alike."""
    rows, columns = values.shape
    left = _signs(rows, 1)
    right = _signs(columns, 2)
    projected = left @ (values.float() @ right.T) / math.sqrt(rows * columns)
    return Sketch((rows, columns), projected)


def _signs(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
    return torch.randint(0, 2, (_SKETCH, length), generator=generator).float() * 2 - 1


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return ‖one − other‖ / ‖one‖; infinity if one side alone is 0 or they hold NaN."""
    norm = float(one.float().norm())
    difference = float((one.float() - other.float()).norm())
    if not math.isfinite(norm) or not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else (math.inf if difference else 0.0)


def diagnose(
    layer: str,
    trainer: torch.Tensor,
    engine: torch.Tensor,
    rounding: float,
    engine_sketches: Mapping[str, Sketch],
    config: Mapping[str, Any],
    off: str,
) -> Cause:
    """Return why a layer's values differ.

    Args:
        layer: its name.
        trainer: A, fp32 [O, I] or [O].
        engine: B, dequantized, fp32.
        rounding: relative distance that rounding explains.
        engine_sketches: layer → sketch of the engine's tensor, of all layers.
        config: the model's settings, for heads.
        off: clause about the codes that differ, or "".
    """
    bound = max(2 * rounding, 4e-3)
    cause = _not_finite(layer, trainer, engine)
    # Zeros resemble any other zeros, so that an order or another layer could not be told.
    if cause is None and trainer.ndim == 2 and engine.ndim == 2 and trainer.any():
        cause = _rearranged(layer, trainer, engine, bound, engine_sketches, config)
    if cause is None:
        cause = incomparable(layer, trainer, engine)
    return _changed(layer, trainer, engine, rounding, off) if cause is None else cause


def incomparable(layer: str, trainer: torch.Tensor, engine: torch.Tensor) -> Cause | None:
    """Return the cause if the distance of two different tensors says nothing: a side holds NaN or
    infinity, or is all zeros, or the shapes differ.
    """
    cause = _not_finite(layer, trainer, engine)
    if cause is not None:
        return cause
    if trainer.shape != engine.shape:
        return fault(
            "shape",
            layer,
            f"the trainer has {list(trainer.shape)}, the engine {list(engine.shape)}",
            "compare the two models' config.json",
        )
    for side, tensor in (("engine", engine), ("trainer", trainer)):
        if not tensor.any():
            return fault("zeros", layer, f"the {side}'s tensor is all zeros", "load it again")
    return None


def _not_finite(layer: str, trainer: torch.Tensor, engine: torch.Tensor) -> Cause | None:
    for side, tensor in (("engine", engine), ("trainer", trainer)):
        if not tensor.isfinite().all():
            text = f"the {side}'s tensor holds NaN or infinity"
            return fault("not-finite", layer, text, "load it again")
    return None


def _rearranged(
    layer: str,
    trainer: torch.Tensor,
    engine: torch.Tensor,
    bound: float,
    sketches: Mapping[str, Sketch],
    config: Mapping[str, Any],
) -> Cause | None:
    """Return the cause if the engine holds the right values in a wrong place or order."""
    if trainer.shape == engine.T.shape and distance(trainer, engine.T) <= bound:
        return fault(
            "transposed",
            layer,
            f"the engine's tensor is the transpose of the trainer's {list(trainer.shape)}",
            "write weights as [output rows, input columns]",
        )
    other = _same_values(layer, trainer, bound, sketches)
    if other is not None:
        return _misplaced(layer, other)
    if trainer.shape != engine.shape:
        return None
    for axis, word in ((0, "rows"), (1, "columns")):
        a, b = (trainer, engine) if axis == 0 else (trainer.T, engine.T)
        order = _permutation(a, b)
        if order is None:
            continue
        moved = int((order != torch.arange(len(order))).sum())
        if not moved or distance(a, b[order]) > min(bound, distance(a, b) / 2):
            continue
        text = f"{moved} of {len(order)} {word} are in another order"
        remedy = "write the layer's rows in the order of transformers' checkpoint"
        if axis == 0 and _is_rotary(order, layer, config):
            text += ", that of interleaved rotary pairs within each head"
            remedy = "convert q and k to rotate_half's order (Meta's, Megatron's and GGUF's differ)"
        return fault("permuted", layer, text, remedy)
    return None


def _same_values(
    layer: str, trainer: torch.Tensor, bound: float, sketches: Mapping[str, Sketch]
) -> str | None:
    """Return the engine's other layer that holds the trainer's values, or None."""
    own = sketch(trainer)
    norm = float(own.values.norm())
    best = (math.inf, "")
    for name, candidate in sketches.items():
        if name != layer and candidate.shape == own.shape:
            gap = float((candidate.values - own.values).norm()) / max(norm, 1e-30)
            best = min(best, (gap, name))
    # a sketch has 36 numbers, so that its relative error is within twice that of the tensor
    return best[1] if best[0] <= max(2 * bound, 0.05) and best[0] < 0.6 else None


def _misplaced(layer: str, other: str) -> Cause:
    """Return the cause for a layer whose values the engine holds under another name."""
    expert, other_expert = _EXPERT.match(layer), _EXPERT.match(other)
    if expert and other_expert and expert.group(1, 3) == other_expert.group(1, 3):
        return fault(
            "expert-order",
            layer,
            f"the engine holds its values as expert {other_expert['number']}",
            "publish experts in the order of the router's rows",
        )
    pair = frozenset({layer.rpartition(".")[2], other.rpartition(".")[2]})
    if pair in _SIBLINGS and layer.rpartition(".")[0] == other.rpartition(".")[0]:
        return fault(
            "exchanged",
            layer,
            f"{_SIBLINGS[pair]}: the engine holds its values as {other!r}",
            "fuse in the engine's order: q, k, v and gate, up",
        )
    block, other_block = _BLOCK.match(layer), _BLOCK.match(other)
    if block and other_block and block["rest"] == other_block["rest"]:
        return fault(
            "layer-order",
            layer,
            f"the engine holds its values in layer {other_block['number']}",
            "number layers alike (a pipeline stage's offset, layers counted from 1)",
        )
    return fault(
        "misplaced",
        layer,
        f"the engine holds its values as {other!r}",
        "correct the mapping of names",
    )


def _permutation(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Return the order of rows of `other` that is nearest to `one`'s, int [O]; None if it is no
    permutation or too large to look for.
    """
    if one.shape[0] > _LARGEST or one.shape[0] < 2:
        return None
    projection = _signs(one.shape[1], 3).T
    order = torch.cdist(one @ projection, other @ projection).argmin(1)
    if len(order.unique()) < 0.98 * len(order):
        return None
    return order


def _is_rotary(order: torch.Tensor, layer: str, config: Mapping[str, Any]) -> bool:
    """Return whether rows are permuted as between interleaved rotary pairs and two halves."""
    heads = config.get("num_attention_heads")
    if not layer.endswith(("q_proj", "k_proj")) or not heads:
        return False
    size = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if not size or len(order) % size:
        return False
    rows = torch.arange(len(order)).view(-1, size // 2, 2)
    halves = rows.transpose(1, 2).reshape(-1)
    agreement = max(
        float((order == halves).float().mean()),
        float((order == halves.argsort()).float().mean()),
    )
    return agreement > 0.98


def _changed(
    layer: str, trainer: torch.Tensor, engine: torch.Tensor, rounding: float, off: str
) -> Cause:
    """Return the cause for values that differ in place, neither of them all zeros."""
    gap = distance(trainer, engine)
    size = f"‖Δ‖ is {gap:.2g} of ‖W‖, of which rounding explains {rounding:.2g}{off}"
    a, b = trainer.flatten().double(), engine.flatten().double()
    factor = float(a @ b / (b @ b))
    residual = float((a - factor * b).norm() / a.norm())
    if abs(factor - 1) > 0.05 and residual <= max(2 * rounding, 4e-3):
        return fault(
            "scaled",
            layer,
            f"the engine's values times {factor:.4g} are the trainer's",
            "compare the layers' scales, and what is folded into them (norms, embeddings' factor)",
        )
    correlation = float(a @ b / (a.norm() * b.norm()))
    if correlation < 0.5:
        return fault(
            "unrelated",
            layer,
            f"{size}; the values correlate by {correlation:.2f}",
            "check that both sides are the same model",
        )
    return fault(
        "stale",
        layer,
        f"{size}; the values correlate by {correlation:.4f}: another version of these weights, or"
        " codes that a calibration moved (GPTQ, AWQ)",
        "publish the trainer's present weights, and compare again",
    )
