"""In which way a layer's values on two sides agree.

Axes: O output rows, I input columns.
"""

from collections.abc import Mapping
from itertools import product

import torch
from compressed_tensors.quantization import QuantizationScheme

from qarl.quant.materialize import LowBitWeight
from qarl.verify.findings import Cause, fault
from qarl.verify.quantization import CODES, nearest, rounded
from qarl.verify.sides import Side

BESIDE_CODES = ("weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx")
"""Further tensors of a layer with codes, which belong to its weight."""
_ULP = 2.0**-8
"""Relative spacing of bfloat16."""


def agreement(
    trainer: Side,
    engine: Side,
    layer: str,
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
) -> str:
    """Return in which way a layer's values agree, a state of docs/guide/verify.md, or "different".

    Args:
        trainer: The trainer's side.
        engine: The engine's side.
        layer: Name of the layer.
        ours: The trainer's tensors of it.
        theirs: The engine's tensors of it.
        a: The trainer's weight, codes dequantized.
        b: The engine's weight, codes dequantized.
    """
    if a.shape != b.shape or not all(values.isfinite().all() for values in (a, b)):
        return "different"
    mine = trainer.stored_scheme(layer)
    other = engine.stored_scheme(layer)
    if mine is not None and other is not None and not engine.effective:
        if _same_bytes(ours, theirs):
            return "equal codes and scales"
        return "equal values of other codes" if torch.equal(a, b) else "different"
    if mine is not None:
        same = rounds_to(a, b, toward_zero=engine.effective)
        return "the trainer's codes, dequantized" if same else "different"
    if other is None:
        if torch.equal(a, b):
            return "equal"
        return "equal after a cast" if rounds_to(a, b) else "different"
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
    stored_as = (scale_dtype(tensors),)
    if effective:
        stored_as = (torch.bfloat16, torch.float16, torch.float32)
    for cast, dtype in product(casts, stored_as):
        codes = rounded(cast, scheme, dtype, layer)
        if codes is None:
            continue
        if effective:
            if rounds_to(codes.dequantized(), values, toward_zero=True):
                return "codes of these masters, as the engine multiplies"
            continue
        if _same_codes(codes, tensors):
            return "codes of these masters, bit for bit"
    if rounds_to(master, values):
        return "fake-quantized values"
    if effective:
        return "different"
    for cast in casts:
        near = nearest(cast, tensors, scheme)
        if near is not None and not fraction_off(cast, values, near, master.dtype):
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


def fraction_off(
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


def rounds_to(one: torch.Tensor, other: torch.Tensor, toward_zero: bool = False) -> bool:
    """Return whether two tensors are equal after a cast of one to the other's dtype, or differ by
    a rounding to the coarser of their dtypes at most. Whole numbers are roundings of none.

    toward_zero: whether a rounding may be one toward zero, which moves a value twice as far as one
    to the nearest. vLLM's low-bit kernels round so on CPUs with AVX-512 but without its bfloat16
    instructions.
    """
    if one.shape != other.shape or one.is_floating_point() != other.is_floating_point():
        return False
    for cast, exact in ((one, other), (other, one)):
        if torch.equal(cast.to(exact.dtype), exact):
            return True
    coarse = {torch.bfloat16: _ULP, torch.float16: _ULP / 8}
    relative = max(coarse.get(side.dtype, 1e-6) for side in (one, other)) * (1 + toward_zero)
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
    names = (ours.keys() | theirs.keys()) & {*CODES, "weight", *BESIDE_CODES}
    return all(
        name in ours
        and name in theirs
        and ours[name].dtype == theirs[name].dtype
        and torch.equal(ours[name], theirs[name])
        for name in names
    )


def other_scales(
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


def scale_dtype(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype in which a layer's scales are stored; bfloat16 if it has none."""
    scale = tensors.get("weight_scale")
    if scale is None or scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return torch.bfloat16
    return scale.dtype
