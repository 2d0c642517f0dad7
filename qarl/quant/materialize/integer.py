"""Quantize weights to int4 or int8 codes with a scale per row or quantization group.

Source: compressed-tensors 0.17 `calculate_qparams`, `_quantize`, `pack_to_int32`.
Axes: O output rows, I input columns, Q quantization groups.
"""

import torch

from qarl.quant.materialize.scales import absmax, stored_scale


def quantize(
    weight: torch.Tensor,
    bits: int,
    columns: int,
    packs: bool,
    dtype: torch.dtype,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight to integer codes.

    The scale is absmax divided by half the code range, unless `kept` has the scales. A code is
    weight / scale, clamped and rounded half to even. Nothing is checked here, so that this compiles
    to one kernel. The result is valid only if `check_scale` accepts it.

    Args:
        weight: fp32, bf16 or fp16 [O, I].
        bits: bits of a code, 4 or 8.
        columns: columns of a quantization group.
        packs: pack the codes into int32 (`pack`).
        dtype: dtype of scales.
        kept: scales to use, of that dtype [O, Q].

    Returns:
        Codes int8 [O, I] or packed int32, scales [O, Q], absmax [O, Q] in the master's dtype.
    """
    low, high, half_range = integer_range(bits)
    grouped = weight.reshape(weight.shape[0], -1, columns)
    largest = absmax(grouped)
    scale = stored_scale(largest, half_range, dtype) if kept is None else kept
    quotients = (grouped / scale.unsqueeze(-1)).clamp_(low, high)
    codes = quotients.round_().to(torch.int8).view(weight.shape)
    return (pack(codes, bits) if packs else codes), scale, largest


def integer_range(bits: int) -> tuple[int, int, float]:
    """Return the lowest code, the highest code and half the distance between them.

    That half is absmax / scale: 7.5 for int4, 127.5 for int8. Raises `ValueError` for another
    width, which nothing here packs.
    """
    if bits not in (4, 8):
        raise ValueError(f"integer codes of {bits} bits; only 4 and 8 are packed")
    low = -(2 ** (bits - 1))
    high = 2 ** (bits - 1) - 1
    return low, high, (high - low) / 2


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 codes [O, I] into int32 words [O, I · bits / 32].

    A code is stored as code + 2^(bits-1). The first column is in the lowest bits.
    """
    unsigned = (codes + 2 ** (bits - 1)).view(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of packed words, int32 [O, W] → int8 [O, W · 32 / bits].

    The inverse of `pack`.
    """
    unsigned = words.view(torch.uint8)
    if bits == 4:
        unsigned = halves(unsigned)
    return unsigned.view(torch.int8) - 2 ** (bits - 1)


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Return the two 4-bit codes of each byte, low half first: uint8 [O, W] → uint8 [O, 2W]."""
    # The compiler would write a stack to memory before reading it, so it gets shifts instead.
    # Eagerly the stack is faster.
    if torch.compiler.is_compiling():
        shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=codes.device)
        return (codes.unsqueeze(-1) >> shifts & 15).flatten(1)
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
