"""Integer and per-row fp8 codes on CPUs in one pass over the master: the arithmetic of `integer`
and `fp8`, compiled.

A row is read once from memory: its groups' absolute maxima, the stored scales and the codes are
made while it is in the cache, and written where they are published from. Nothing of the weight's
size is held in between. numba (LLVM, no compiler needed) builds the loops at first use, in about
two seconds, and keeps them on disk.

Every operation is IEEE's and rounds as torch's does (tests/quant/test_fused.py compares bits); no
fast-math. All numbers are float32 values in registers: a bfloat16 master is widened, and what torch
would round to bfloat16 is rounded here too. Bits are uint32 throughout, and numba widens mixed
integers, hence the casts. Axes: O output rows, I input columns, Q quantization groups.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from qarl.quant.runtime.llvmlite_repair import repair

repair()
F = np.float32
U = np.uint32
_intrinsic: Any = intrinsic
_LARGEST = F(np.finfo(np.float32).max)
_SMALLEST_STORED = F(np.finfo(np.float32).eps)
_SPLIT = F(2.0**16 + 1)
"""Veltkamp's splitting: x · s - (x · s - x) is x rounded to bfloat16's 8 bits, but for the
direction of ties.
"""
_INTEGER_BIAS = F(1.5 * 2.0**23)
"""Added to a small float32, leaves its nearest integer (ties to even) in the lowest bits."""


def _compiled(function: Any) -> Any:
    """numba's compiler: IEEE arithmetic, no interpreter lock; kept on disk where a cache folder can
    be written.
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return njit(function, cache=True, **options)
    # "cannot cache function …: no locator available": a read-only home and installation
    except RuntimeError:
        return njit(function, **options)


@_intrinsic
def _value(typing: Any, bits: Any) -> Any:
    """float32 of uint32 float32 bits, or of uint16 bfloat16 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, int32 = args[0], ir.IntType(32)
        if word.type.width == 16:
            word = builder.shl(builder.zext(word, int32), ir.Constant(int32, 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(bits), build


@_intrinsic
def _bits(typing: Any, value: Any) -> Any:
    """uint32 bits of a float32."""
    return types.uint32(value), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@_intrinsic
def _magnitude(typing: Any, bits: Any) -> Any:
    """The same bits without the sign, in the same width. Ordered as the magnitudes are, with NaN
    above infinity.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[0].type.width
        return builder.and_(args[0], ir.Constant(ir.IntType(width), 2 ** (width - 1) - 1))

    return bits(bits), build


@_compiled
def _to_bfloat16(value):
    """Rounded to the nearest bfloat16, ties to even; finite values."""
    bits = _bits(value)
    rounded = U(bits + U(0x7FFF) + U(U(bits >> U(16)) & U(1)))
    return _value(U(rounded & U(0xFFFF0000)))


@_compiled
def _narrowed(bits, mantissa, bias):
    """Bits of the nearest small float with that many mantissa bits and that exponent bias, ties to
    even.

    bits: of a float32 magnitude within the small float's range. Below its normal numbers, an
    addition to a number whose last place is the small float's smallest step does the rounding.
    """
    shift = U(23 - mantissa)
    odd = U(U(bits >> shift) & U(1))
    rebias = U((127 - bias) << 23)
    normal = U(U(bits - rebias + U(U(U(1) << U(shift - U(1))) - U(1)) + odd) >> shift)
    step = U((151 - bias - mantissa) << 23)
    tiny = U(_bits(F(_value(bits) + _value(step))) - step)
    return tiny if bits < U((128 - bias) << 23) else normal


@_compiled
def _float16_value(bits):
    """float32 of the bits of a finite, positive float16."""
    if bits < U(0x400):
        return F(F(bits) * F(2.0**-24))
    return _value(U(U(bits << U(13)) + U(112 << 23)))


@_compiled
def _as_stored(value, stored):
    """(bits, value) of a positive scale as float32 (stored 32), bfloat16 (0) or float16 (16)."""
    if stored == 32:
        return _bits(value), value
    if stored == 0:
        rounded = _to_bfloat16(value)
        return U(_bits(rounded) >> U(16)), rounded
    bits = _narrowed(_bits(value), 10, 15)
    return bits, (_float16_value(bits) if bits < U(0x7C00) else F(np.inf))


@_compiled
def _absmax(group):
    """Bits of the largest magnitude."""
    largest = _magnitude(group[0])
    for i in range(group.size):
        largest = max(largest, _magnitude(group[i]))
    return largest


@_compiled
def _quotients(row, columns, scales, rounds, bounded, quotients):
    """w / scale of a row, float32. rounds: whether torch rounds it to bfloat16, as it does for
    bfloat16 by bfloat16.

    Then a product with the reciprocal does, at half the time. Both significands have 8 bits, so a
    quotient that is not halfway between two bfloat16 numbers is at least 2^-17 of itself away from
    there, and the product within 2^-22 of the quotient. None is halfway: that has 9 significant
    bits, and times an odd number it has no fewer. Outside of the range below a reciprocal may be
    infinite, or have lost bits; and where quotients are not `bounded` by half the code range, the
    splitting may overflow.
    """
    groups, results = (
        row.reshape((scales.size, columns)),
        quotients.reshape((scales.size, columns)),
    )
    for q in range(scales.size):
        group, result, scale = groups[q], results[q], scales[q]
        if rounds and bounded and F(2.0**-100) <= scale <= F(2.0**100):
            inverse = F(F(1) / scale)
            for i in range(group.size):
                quotient = F(_value(group[i]) * inverse)
                shifted = F(quotient * _SPLIT)
                result[i] = F(shifted - F(shifted - quotient))
        elif rounds:
            for i in range(group.size):
                result[i] = _to_bfloat16(F(_value(group[i]) / scale))
        else:
            for i in range(group.size):
                result[i] = F(_value(group[i]) / scale)


@_compiled
def _integers(quotients, low, high, offset, mask, codes):
    """round(clamp(quotient)) + offset, a byte each."""
    bias = F(_INTEGER_BIAS + offset)
    for i in range(quotients.size):
        value = min(max(quotients[i], low), high)
        codes[i] = np.uint8(_bits(F(value + bias)) & mask)


@_compiled
def _e4m3(quotients, low, high, codes):
    """The nearest e4m3 of clamp(quotient), a byte each."""
    for i in range(quotients.size):
        value = min(max(quotients[i], low), high)
        bits = _bits(value)
        sign = U(U(bits >> U(24)) & U(0x80))
        codes[i] = np.uint8(_narrowed(U(bits & U(0x7FFFFFFF)), 3, 7) | sign)


@_compiled
def _pack(nibbles, codes):
    """Eight bytes holding four bits each, a uint64, to a uint32 of those bits, first byte
    lowest.
    """
    for i in range(nibbles.size):
        word = nibbles[i]
        word = (word | (word >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
        word = (word | (word >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
        codes[i] = np.uint32(word | (word >> np.uint64(16)))


@_compiled
def _row_scales(master, columns, stored, epsilon, half_range, scales, values):
    """Of every group of a row: its scale as stored, and as a float32. Returns whether weights and
    scales are finite.
    """
    finite = True
    narrow = master.itemsize == 2
    for q in range(scales.size):
        absmax = _value(_absmax(master[q * columns : (q + 1) * columns]))
        finite &= absmax <= _LARGEST
        values[q] = absmax
    for q in range(scales.size):
        scale = F(values[q] / half_range)
        if narrow:
            scale = _to_bfloat16(scale)
        if scale == F(0):
            scale = epsilon
        bits, value = _as_stored(scale, stored)
        finite &= value <= _LARGEST
        if value == F(0):
            bits, value = _as_stored(_SMALLEST_STORED, stored)
        scales[q] = bits
        values[q] = value
    return finite


@_compiled
def _kept_scales(master, columns, stored, scales, values):
    """Of every group of a row: the scale that is there, as a float32. Returns whether weights and
    scales are finite.
    """
    finite = True
    for q in range(scales.size):
        finite &= _value(_absmax(master[q * columns : (q + 1) * columns])) <= _LARGEST
        bits = U(scales[q])
        if stored == 16:
            values[q] = _float16_value(bits) if bits < U(0x7C00) else F(np.inf)
        else:
            values[q] = _value(U(bits << U(16)) if stored == 0 else bits)
        finite &= values[q] <= _LARGEST
    return finite


@_compiled
def quantize_rows(
    master,
    columns,
    stored,
    epsilon,
    half_range,
    low,
    high,
    offset,
    kind,
    kept,
    scales,
    codes,
):
    """Quantize rows. Returns whether every weight and scale was finite; if not, the rest is not
    written.

    master: bits of bfloat16 (uint16) or float32 (uint32) [O, I]. columns: of a quantization group.
    stored: see `_as_stored`; epsilon: the scale of a group of zeros; half_range: absmax / scale;
    all floats are float32. kind: 4 packs nibbles, 8 writes integers, 0 e4m3. offset: added to
    integer codes. kept: whether scales are read instead of written. scales: bits, uint16 or uint32
    [O, Q]. codes: uint32 [O, I/8] for kind 4, else uint8 [O, I].
    """
    rounds = master.itemsize == 2 and stored == 0
    width = master.shape[1]
    values = np.empty(width // columns, np.float32)
    quotients = np.empty(width, np.float32)
    nibbles = np.empty(width if kind == 4 else 0, np.uint8)
    for o in range(master.shape[0]):
        if kept:
            finite = _kept_scales(master[o], columns, stored, scales[o], values)
        else:
            finite = _row_scales(master[o], columns, stored, epsilon, half_range, scales[o], values)
        if not finite:
            return False
        _quotients(master[o], columns, values, rounds, not kept, quotients)
        if kind == 4:
            _integers(quotients, low, high, offset, U(15), nibbles)
            _pack(nibbles.view(np.uint64), codes[o])
        elif kind == 8:
            _integers(quotients, low, high, offset, U(255), codes[o])
        else:
            _e4m3(quotients, low, high, codes[o])
    return True
