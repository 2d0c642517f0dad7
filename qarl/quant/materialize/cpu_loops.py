"""Make integer and per-row fp8 codes on CPUs in one compiled pass over the master.

The arithmetic is that of `integer` and `fp8`. A row is read from memory once. Its groups' absolute
maxima, stored scales and codes are computed while it is in the cache, and written directly to the
buffers that are published. No scratch buffer has the weight's size. numba (LLVM, no compiler
needed) builds the loops at first use, in about two seconds, and caches them on disk.

Every operation is IEEE's and rounds as torch's does, without fast-math (tests/quant/test_fused.py
compares bits). All numbers are float32 values in registers. A bfloat16 master is widened, and
whatever torch would round to bfloat16 is rounded here too. Bits are uint32 throughout. The casts
are needed because numba widens mixed integers.

Axes: O output rows, I input columns, Q quantization groups.
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
"""Largest finite float32."""
_SMALLEST_STORED = F(np.finfo(np.float32).eps)
"""Scale that replaces one that the cast to its stored dtype rounds to zero."""
_SPLIT = F(2.0**16 + 1)
"""Factor s of Veltkamp's splitting: x · s - (x · s - x) is x rounded to bfloat16's 8 significant
bits, except for the direction of ties.
"""
_INTEGER_BIAS = F(1.5 * 2.0**23)
"""Number that, added to a small float32, leaves its nearest integer (ties to even) in the lowest
bits.
"""


def _compiled(function: Any) -> Any:
    """Compile a function with numba, with IEEE arithmetic and without the interpreter lock.

    The result is cached on disk if numba finds a cache folder that it can write.
    """
    options = {"nogil": True, "error_model": "numpy", "fastmath": False}
    try:
        return njit(function, cache=True, **options)
    # "cannot cache function …: no locator available" if home and installation are read-only
    except RuntimeError:
        return njit(function, **options)


@_intrinsic
def _value(typing: Any, bits: Any) -> Any:
    """Return the float32 value of float32 bits (uint32) or bfloat16 bits (uint16)."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, int32 = args[0], ir.IntType(32)
        if word.type.width == 16:
            word = builder.shl(builder.zext(word, int32), ir.Constant(int32, 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(bits), build


@_intrinsic
def _bits(typing: Any, value: Any) -> Any:
    """Return the bits of a float32, uint32."""
    return types.uint32(value), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@_intrinsic
def _magnitude(typing: Any, bits: Any) -> Any:
    """Clear the sign of a float's bits, in the same width.

    The result as an integer is ordered as the magnitudes are, with NaN above infinity.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[0].type.width
        return builder.and_(args[0], ir.Constant(ir.IntType(width), 2 ** (width - 1) - 1))

    return bits(bits), build


@_compiled
def _to_bfloat16(value):
    """Round a finite value to the nearest bfloat16, ties to even."""
    bits = _bits(value)
    rounded = U(bits + U(0x7FFF) + U(U(bits >> U(16)) & U(1)))
    return _value(U(rounded & U(0xFFFF0000)))


@_compiled
def _narrowed(bits, mantissa, bias):
    """Return the bits of the nearest small float, ties to even.

    mantissa and bias describe the small float: its mantissa bits and exponent bias. bits are those
    of a float32 magnitude within its range. Below its normal numbers, the rounding is done by
    adding a number whose last place is the small float's smallest step.
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
    """Return the float32 value of the bits of a finite, positive float16."""
    if bits < U(0x400):
        return F(F(bits) * F(2.0**-24))
    return _value(U(U(bits << U(13)) + U(112 << 23)))


@_compiled
def _as_stored(value, stored):
    """Round a positive scale to its stored dtype; return (bits, value).

    stored: 32 for float32, 0 for bfloat16, 16 for float16.
    """
    if stored == 32:
        return _bits(value), value
    if stored == 0:
        rounded = _to_bfloat16(value)
        return U(_bits(rounded) >> U(16)), rounded
    bits = _narrowed(_bits(value), 10, 15)
    return bits, (_float16_value(bits) if bits < U(0x7C00) else F(np.inf))


@_compiled
def _absmax(group):
    """Return the bits of the largest magnitude in a group."""
    largest = _magnitude(group[0])
    for i in range(group.size):
        largest = max(largest, _magnitude(group[i]))
    return largest


@_compiled
def _quotients(row, columns, scales, rounds, bounded, quotients):
    """Write w / scale of a row into `quotients`, float32.

    rounds: whether torch rounds a quotient to bfloat16, as it does if both operands are bfloat16.
    bounded: whether quotients are at most half the code range, as with scales of the extremes.

    If torch rounds, a product with the reciprocal gives the same bits in half the time. Both
    significands have 8 bits. A quotient that is not halfway between two bfloat16 numbers is
    therefore at least 2^-17 of itself away from the midpoint, and the product is within 2^-22 of
    the quotient. No quotient is halfway, because a midpoint has 9 significant bits, and its product
    with an odd number has no fewer. For scales outside the range below, the reciprocal may be
    infinite or have lost bits. For quotients that are not bounded, the splitting may overflow.
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
    """Write round(clamp(quotient)) + offset into `codes`, one byte each."""
    bias = F(_INTEGER_BIAS + offset)
    for i in range(quotients.size):
        value = min(max(quotients[i], low), high)
        codes[i] = np.uint8(_bits(F(value + bias)) & mask)


@_compiled
def _e4m3(quotients, low, high, codes):
    """Write the nearest e4m3 of clamp(quotient) into `codes`, one byte each."""
    for i in range(quotients.size):
        value = min(max(quotients[i], low), high)
        bits = _bits(value)
        sign = U(U(bits >> U(24)) & U(0x80))
        codes[i] = np.uint8(_narrowed(U(bits & U(0x7FFFFFFF)), 3, 7) | sign)


@_compiled
def _pack(nibbles, codes):
    """Pack each uint64, eight bytes with four bits each, into a uint32, first byte lowest."""
    for i in range(nibbles.size):
        word = nibbles[i]
        word = (word | (word >> np.uint64(4))) & np.uint64(0x00FF00FF00FF00FF)
        word = (word | (word >> np.uint64(8))) & np.uint64(0x0000FFFF0000FFFF)
        codes[i] = np.uint32(word | (word >> np.uint64(16)))


@_compiled
def _row_scales(master, columns, stored, epsilon, half_range, scales, values):
    """Compute the scales of a row's groups: stored bits into `scales`, float32 into `values`.

    Returns whether weights and scales are finite.
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
    """Read the existing scales of a row's groups as float32 into `values`.

    Returns whether weights and scales are finite.
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
    """Quantize rows. Return whether every weight and scale was finite.

    Stops at the first row that is not finite; its codes and all rows after it stay unwritten. All
    floats are float32.

    Args:
        master: bits of bfloat16 (uint16) or float32 (uint32) [O, I].
        columns: columns of a quantization group.
        stored: dtype of scales; see `_as_stored`.
        epsilon: scale of a group of zeros.
        half_range: absmax / scale.
        low: lowest code.
        high: highest code.
        offset: number added to integer codes.
        kind: 4 for packed nibbles, 8 for integers, 0 for e4m3.
        kept: read scales instead of writing them.
        scales: bits, uint16 or uint32 [O, Q].
        codes: uint32 [O, I/8] for kind 4, else uint8 [O, I].
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
