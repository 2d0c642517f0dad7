"""int4 and int8 codes with a scale a row or a quantization group.

Source: compressed-tensors 0.17 `calculate_qparams`, `_quantize`, `pack_to_int32`.
Axes: O output rows, I input columns, Q quantization groups.
"""

import torch

from quant.materialize.scales import finite_absmax, stored_scale
from quant.schemes import Scheme


def quantize(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: fp32 or bf16 [O, I] → codes as stored (`LowBitWeight.codes`), scale in `dtype` [O, Q].

    The scale is absmax divided by half the code range; codes are weight / scale, clamped, rounded half to even.
    """
    args = scheme.weights
    assert args is not None
    low, high = -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1
    grouped = weight.reshape(weight.shape[0], -1, scheme.group_size or weight.shape[1])
    scale = stored_scale(finite_absmax(grouped, layer), (high - low) / 2, dtype, layer)
    codes = (grouped / scale.unsqueeze(-1)).clamp_(low, high).round_().to(torch.int8).view(weight.shape)
    return (pack(codes, args.num_bits) if scheme.packs_integers else codes), scale


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 codes [O, I] → int32 [O, I · bits / 32]: code + 2^(bits-1), first column in the lowest bits."""
    unsigned = (codes + 2 ** (bits - 1)).view(torch.uint8)
    if bits == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: int32 [O, W] → int8 [O, W · 32 / bits]."""
    unsigned = words.view(torch.uint8)
    if bits == 4:
        unsigned = torch.stack((unsigned & 15, unsigned >> 4), dim=-1).flatten(1)
    return unsigned.view(torch.int8) - 2 ** (bits - 1)
