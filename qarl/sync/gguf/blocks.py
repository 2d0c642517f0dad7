"""Lay low-bit weights out as llama.cpp's blocks, without computing a code or a scale anew.

A block has 32 columns of a row: a scale and 32 codes. A quantization group of 32, 64 or 128
columns, or a whole row, becomes several blocks with the same scale.

| type | bytes | scale | codes |
|---|---|---|---|
| Q4_0 | 18 | fp16 | code + 8 in 4 bits; byte j has column j in its low half, column j + 16 above |
| Q8_0 | 34 | fp16 | int8 |
| MXFP4 | 17 | biased exponent | e2m1, in Q4_0's order |

Source: ggml's `block_q4_0`, `block_q8_0`, `block_mxfp4`.
Axes: O output rows, I input columns, Q quantization groups, K blocks of a row.
"""

from collections.abc import Mapping

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from qarl.configs.schemes import SCHEME_SPECS, SchemeSpec
from qarl.quant.materialize.integer import halves
from qarl.quant.materialize.weight import LowBitWeight
from qarl.sync.gguf.errors import GgufError

BLOCK = 32
"""Columns of a block."""
_TYPES: Mapping[tuple[str, int, str], GGMLQuantizationType] = {
    ("int", 4, "compute"): GGMLQuantizationType.Q4_0,
    ("int", 8, "compute"): GGMLQuantizationType.Q8_0,
    ("float", 4, "power"): GGMLQuantizationType.MXFP4,
}
"""Kind and bits of codes, and format of scales → the type of tensor that has them exactly."""


def block_type(scheme: SchemeSpec) -> GGMLQuantizationType | None:
    """Return the GGUF type that has a scheme's codes and scales exactly, None if there is none.

    No type fits if activations are quantized as well: llama.cpp rounds those in its own way.
    """
    codes = scheme.weights
    if codes is None or scheme.activations is not None or not codes.symmetric or codes.rows > 1:
        return None
    if codes.columns is not None and codes.columns % BLOCK:
        return None
    return _TYPES.get((codes.kind, codes.bits, codes.scale))


def supported_schemes() -> tuple[str, ...]:
    """Return the names of the low-bit schemes that a GGUF file has exactly."""
    return tuple(name for name, spec in SCHEME_SPECS.items() if block_type(spec) is not None)


def blocks_of(weight: LowBitWeight, layer: str) -> np.ndarray:
    """Return a weight's blocks, uint8 [O, K · bytes of a block].

    Raises `GgufError` if a row is no multiple of 32 columns, or if a scale is no fp16 value; it
    names `layer`.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise GgufError(
            f"layer {layer!r} has {columns} input columns; GGUF's blocks have {BLOCK} columns of"
            f" one row: leave that layer in the compute dtype (--layers {layer}=bf16)"
        )
    kind = block_type(SCHEME_SPECS[weight.scheme.name])
    assert kind is not None, weight.scheme.name
    assert weight.scale is not None
    per_group = columns // weight.scale.shape[1] // BLOCK
    scale = weight.scale.repeat_interleave(per_group, dim=1)
    if kind == GGMLQuantizationType.MXFP4:
        codes = _halves(halves(weight.codes).view(rows, -1, BLOCK))
        stored = scale.unsqueeze(-1)
    else:
        values = weight.unpacked().view(rows, -1, BLOCK)
        stored = _fp16(scale, values, layer).unsqueeze(-1).view(torch.uint8)
        is_q4 = kind == GGMLQuantizationType.Q4_0
        codes = _halves((values + 8).view(torch.uint8)) if is_q4 else values.view(torch.uint8)
    blocks = torch.cat((stored, codes), dim=-1)
    assert blocks.shape[-1] == GGML_QUANT_SIZES[kind][1]
    return blocks.view(rows, -1).numpy()


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes two per byte: uint8 [O, K, 32] → uint8 [O, K, 16]."""
    return codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)


def _fp16(scale: torch.Tensor, codes: torch.Tensor, layer: str) -> torch.Tensor:
    """Return the scales of blocks in fp16, [O, K].

    A block whose codes are all zero has the scale 0 if its own is no fp16 value. Raises `GgufError`
    for any other scale that fp16 has not exactly.

    Args:
        scale: scales in the compute dtype [O, K].
        codes: codes int8 [O, K, 32].
        layer: name of the layer in the error.
    """
    half = scale.to(torch.float16)
    inexact = half.to(torch.float32) != scale.to(torch.float32)
    if not inexact.any():
        return half
    used = inexact & codes.any(dim=-1)
    if used.any():
        row, block = (int(index) for index in used.nonzero()[0])
        raise GgufError(
            f"layer {layer!r}: the scale {float(scale[row, block])!r} of row {row}, columns"
            f" {block * BLOCK} to {(block + 1) * BLOCK - 1}, is not an fp16 value, and GGUF's"
            f" blocks have fp16 scales ({int(used.sum())} of {used.numel()} blocks are affected)."
            " fp16 has every bfloat16 value from 2^-17 to 65280; leave that layer in the compute"
            f" dtype (--layers {layer}=bf16), or train with --dtype float16, whose scales are fp16"
        )
    return half.masked_fill(inexact, 0)
