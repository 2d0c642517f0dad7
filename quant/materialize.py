"""Master weight → low-bit codes and scales, in the layout compressed-tensors checkpoints and vLLM use.

The arithmetic is that of compressed-tensors' `calculate_qparams`, `quantize` and `pack_to_int32`, bit for bit
(tests/test_materialize.py holds them together): the scale is absmax divided by half the code range, in the
master's dtype, then stored in the compute dtype; codes are the master divided by the *stored* scale, clamped,
rounded half to even. Quantizing by the stored scale is what makes learner and engine agree.

Axes: O output rows, I input columns, Q quantization groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationStrategy

from quant.schemes import Scheme, is_integer

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class LowBitWeight:
    """One linear layer's weight as it is multiplied, published and exported.

    codes: int4 → int32 [O, I/8], eight codes a word, lowest bits first; int8 → int8 [O, I];
        fp8 → float8_e4m3fn [O, I]; unquantized → compute dtype [O, I].
    scale: compute dtype [O, Q] (Q = 1 per channel); None when unquantized.
    shape: (O, I) of the weight itself.
    """

    scheme: Scheme
    codes: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, int]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint suffix, tensor) pairs in checkpoint order, e.g. ("weight_packed", int32 [O, I/8])."""
        args = self.scheme.weights
        if args is None or self.scale is None:
            yield "weight", self.codes
        elif args.num_bits == 4:
            yield "weight_packed", self.codes
            yield "weight_scale", self.scale
            yield "weight_shape", torch.tensor(self.shape, dtype=torch.int64)
        else:
            yield "weight", self.codes
            yield "weight_scale", self.scale

    def rows(self, start: int, stop: int) -> "LowBitWeight":
        """The weight of output rows start … stop-1, as views of the same storage."""
        scale = None if self.scale is None else self.scale[start:stop]
        return LowBitWeight(self.scheme, self.codes[start:stop], scale, (stop - start, self.shape[1]))

    def unpacked(self) -> torch.Tensor:
        """Codes one per element, [O, I]: int8 for int4 and int8 schemes, else `codes` itself."""
        args = self.scheme.weights
        if args is not None and args.num_bits == 4:
            return unpack_from_int32(self.codes, 4, torch.Size(self.shape))
        return self.codes

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code · scale, computed in fp32 (exact for every scheme here) and rounded once to `dtype`, [O, I]."""
        codes = self.unpacked().to(torch.float32)
        if self.scale is None:
            return codes.to(dtype)
        grouped = codes.view(self.shape[0], self.scale.shape[1], -1)
        return (grouped * self.scale.to(torch.float32).unsqueeze(-1)).view(self.shape).to(dtype)


@torch.no_grad()
def materialize(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> LowBitWeight:
    """Quantize one master weight.

    weight: fp32 or bf16 [O, I]. dtype: compute dtype, the one scales are stored in.
    Raises `SchemeError` for a shape the scheme cannot hold, `ValueError` for weights that are not finite or whose scale
    overflows `dtype`.
    Source: compressed-tensors 0.17 `calculate_qparams`, `_quantize`, `pack_to_int32`.
    """
    shape = (weight.shape[0], weight.shape[1])
    args = scheme.weights
    if args is None:
        return LowBitWeight(scheme, weight.detach().to(dtype, copy=True), None, shape)
    scheme.check_layer("weight", shape)
    groups = scheme.group_size or shape[1]
    assert args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)
    grouped = weight.detach().view(shape[0], shape[1] // groups, groups)
    integer = is_integer(args)
    low, high = (-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1) if integer else (-_FP8_MAX, _FP8_MAX)

    scale = _stored_scale(grouped, (high - low) / 2, dtype)
    codes = (grouped / scale.unsqueeze(-1)).clamp_(low, high)
    codes = codes.round_().to(torch.int8) if integer else codes.to(torch.float8_e4m3fn)
    codes = codes.view(shape)
    return LowBitWeight(scheme, _pack_int4(codes) if args.num_bits == 4 else codes, scale, shape)


def _stored_scale(grouped: torch.Tensor, half_range: float, dtype: torch.dtype) -> torch.Tensor:
    """absmax / half_range of each group in `dtype`, [O, Q]; a group of zeros gets the master dtype's epsilon."""
    low, high = torch.aminmax(grouped, dim=-1)
    absmax = torch.maximum(high, -low)
    if not torch.isfinite(absmax).all():
        raise ValueError("a master weight holds NaN or infinity and cannot be quantized; resume from a checkpoint")
    scale = absmax / half_range
    eps = torch.finfo(scale.dtype).eps
    scale = scale.masked_fill(scale == 0, eps).to(dtype)
    if not torch.isfinite(scale).all():
        raise ValueError(
            f"a master weight of magnitude {float(absmax.max()):.3g} has a scale beyond {dtype}'s range; use bfloat16 "
            "as the compute dtype (--dtype bfloat16)"
        )
    # A scale that vanished in the cast (float16 ends at 6e-8) becomes the smallest the library itself would store.
    return scale.masked_fill(scale == 0, torch.finfo(torch.float32).eps)


def _pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes in [-8, 7], [O, I] → int32 [O, I/8], code + 8, first column in the lowest bits."""
    nibbles = (codes + 8).view(torch.uint8)
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return pairs.contiguous().view(torch.int32)
