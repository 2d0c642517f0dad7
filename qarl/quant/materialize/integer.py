"""int4 and int8 codes with a scale a row or a quantization group.

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
    """weight: fp32 or bf16 [O, I]; columns: of a quantization group; dtype: of scales; kept: scales
    of that dtype [O, Q], or None.

    Returns codes (int8 [O, I], or packed int32), scale [O, Q], absmax [O, Q] in the master's dtype.
    The scale is the one kept, or absmax divided by half the code range; codes are weight / scale,
    clamped, rounded half to even. They mean something only where `check_scale` finds nothing:
    nothing is checked here, so that this compiles to one kernel.
    """
    low, high, half_range = integer_range(bits)
    grouped = weight.reshape(weight.shape[0], -1, columns)
    largest = absmax(grouped)
    scale = stored_scale(largest, half_range, dtype) if kept is None else kept
    codes = (
        (grouped / scale.unsqueeze(-1)).clamp_(low, high).round_().to(torch.int8).view(weight.shape)
    )
    return (pack(codes, bits) if packs else codes), scale, largest


def integer_range(bits: int) -> tuple[int, int, float]:
    """Lowest and highest code, and half the distance between them: absmax / scale (7.5 of int4,
    127.5 of int8).
    """
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return low, high, (high - low) / 2


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 codes [O, I] → int32 [O, I · bits / 32]: code + 2^(bits-1), first column in the lowest
    bits.
    """
    unsigned = (codes + 2 ** (bits - 1)).view(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: int32 [O, W] → int8 [O, W · 32 / bits]."""
    unsigned = words.view(torch.uint8)
    if bits == 4:
        unsigned = halves(unsigned)
    return unsigned.view(torch.int8) - 2 ** (bits - 1)


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, low half first: uint8 [O, W] → uint8 [O, 2W]."""
    # which would write a stack out before it is read; eagerly that is faster
    if torch.compiler.is_compiling():
        shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=codes.device)
        return (codes.unsqueeze(-1) >> shifts & 15).flatten(1)
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
