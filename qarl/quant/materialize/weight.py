"""One linear layer's weight in low bits: what is multiplied, published and exported.

Axes: O output rows, I input columns, P block rows, Q quantization groups or block columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from qarl.quant.materialize import fp4, integer
from qarl.quant.runtime.compile import compiled, compiler_missing
from qarl.quant.schemes import Scheme, is_integer


@dataclass(frozen=True)
class LowBitWeight:
    """One linear layer's weight.

    codes: packed integers → int32 [O, I · bits / 32], lowest bits first; other integers → int8 [O,
    I];
        fp8 → float8_e4m3fn [O, I]; fp4 → uint8 [O, I/2], low half first; unquantized → compute
        dtype [O, I].
    scale: integers and fp8 → compute dtype [O, Q] (Q = 1 per channel), [P, Q] for blocks; NVFP4 →
    float8_e4m3fn
        [O, Q]; MXFP4 → biased exponents uint8 [O, Q]; None when unquantized.
    shape: (O, I) of the weight itself.
    global_scale: fp32 [1], the divisor of all of an NVFP4 weight's scales; else None.
    """

    scheme: Scheme
    codes: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, int]
    global_scale: torch.Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint suffix, tensor) pairs in checkpoint order, e.g. ("weight_packed", int32 [O,
        I/8]).
        """
        packed = self.codes.dtype in (torch.int32, torch.uint8)
        yield ("weight_packed" if packed else "weight"), self.codes
        if self.scale is not None:
            yield "weight_scale", self.scale
        if self.scheme.packs_integers:
            yield "weight_shape", torch.tensor(self.shape, dtype=torch.int64)
        if self.global_scale is not None:
            yield "weight_global_scale", self.global_scale
        if self.scheme.input_global_scale is not None:
            yield (
                "input_global_scale",
                torch.full((1,), self.scheme.input_global_scale, dtype=torch.float32),
            )

    def buffers(self) -> list[torch.Tensor]:
        """What is written anew with each version: codes and, where there are some, scales."""
        return [
            tensor for tensor in (self.codes, self.scale, self.global_scale) if tensor is not None
        ]

    def rows(self, start: int, stop: int) -> "LowBitWeight":
        """The weight of output rows start … stop-1, as views of the same storage; blocks are not
        cut.
        """
        scale, shape = self.scale, (stop - start, self.shape[1])
        if scale is not None:
            height = self.scheme.block[0] if self.scheme.block else 1
            assert start % height == 0 == stop % height, (
                f"rows {start} to {stop} cut a block of {height} rows"
            )
            scale = scale[start // height : stop // height]
        return replace(self, codes=self.codes[start:stop], scale=scale, shape=shape)

    def without_codes(self) -> "LowBitWeight":
        """The same scale and shape; codes of no values, on the meta device."""
        return replace(self, codes=torch.empty_like(self.codes, device="meta"))

    def overwrite(self, other: "LowBitWeight") -> "LowBitWeight":
        """Copy another weight of the same scheme, shape and dtypes into this one's buffers; returns
        this one.
        """
        for ours, theirs in zip(self.buffers(), other.buffers(), strict=True):
            assert (ours.shape, ours.dtype, ours.device) == (
                theirs.shape,
                theirs.dtype,
                theirs.device,
            )
            ours.copy_(theirs)
        return self

    @property
    def _bits(self) -> int:
        """Of packed integers; 0 where codes are not packed, or are floats."""
        return (
            self.scheme.weights.num_bits
            if self.scheme.weights is not None and self.scheme.packs_integers
            else 0
        )

    def unpacked(self) -> torch.Tensor:
        """Codes one per element, [O, I]: int8 of integers, fp32 values of fp4 codes, else `codes`
        itself.
        """
        return _unpacked(self.codes, self._bits)

    def wide_scale(self) -> torch.Tensor:
        """What codes are multiplied with, fp32, in `scale`'s shape. Not for unquantized weights."""
        assert self.scale is not None
        return _wide(self.scale, self.global_scale)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code · scale in fp32 (exact but for NVFP4's two-level scale), rounded once to `dtype`,
        [O, I]; on GPUs that have a compiler in one pass, by torch.compile, to the same bits.
        """
        if self.scale is None:
            return self.codes.to(dtype)
        height = self.scheme.block[0] if self.scheme.block else 1
        compiles = self.codes.is_cuda and compiler_missing("cuda") is None
        multiply = compiled(_multiplied) if compiles else _multiplied
        return multiply(self.codes, self.scale, self.global_scale, self._bits, height, dtype)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits:
        return integer.unpack(codes, bits)
    return fp4.decode(codes) if codes.dtype == torch.uint8 else codes


def _wide(scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    if scale.dtype == torch.uint8:
        return fp4.power_of_two(scale)
    fp32 = scale.to(torch.float32)
    return fp32 if global_scale is None else fp32 / global_scale


def _multiplied(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    bits: int,
    height: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """bits: see `LowBitWeight._bits`. height: rows that share a scale."""
    values, scale = _unpacked(codes, bits).to(torch.float32), _wide(scale, global_scale)
    if height > 1:
        scale = scale.repeat_interleave(height, dim=0)
    grouped = values.view(values.shape[0], scale.shape[1], -1)
    return (grouped * scale.unsqueeze(-1)).view(values.shape).to(dtype)


def empty(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> LowBitWeight:
    """CPU buffers for an integer scheme, or fp8 with a scale a row; shape: (O, I). Not
    initialized.
    """
    args, (rows, columns) = scheme.weights, shape
    assert args is not None
    assert is_integer(args) or args.num_bits == 8
    stored = torch.int8 if is_integer(args) else torch.float8_e4m3fn
    if scheme.packs_integers:
        stored, columns = torch.int32, columns * args.num_bits // 32
    scales = shape[1] // (scheme.group_size or shape[1])
    codes = torch.empty((rows, columns), dtype=stored)
    return LowBitWeight(scheme, codes, torch.empty((rows, scales), dtype=dtype), shape)
