"""One linear layer's weight in low bits, which is multiplied, published and exported.

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
    """One linear layer's weight: its codes and scales."""

    scheme: Scheme
    """Scheme of codes and scales."""
    codes: torch.Tensor
    """Codes, in a dtype and shape that depend on the scheme:

    - packed integers: int32 [O, I · bits / 32], first column in the lowest bits;
    - other integers: int8 [O, I];
    - fp8: float8_e4m3fn [O, I];
    - fp4: uint8 [O, I/2], first column in the low half;
    - unquantized: the values, compute dtype [O, I].
    """
    scale: torch.Tensor | None
    """Scales, in a dtype and shape that depend on the scheme:

    - integers and fp8: compute dtype [O, Q] (Q = 1 per channel), or [P, Q] for blocks;
    - NVFP4: float8_e4m3fn [O, Q];
    - MXFP4: biased exponents, uint8 [O, Q];
    - unquantized: None.
    """
    shape: tuple[int, int]
    """(O, I) of the weight, which differs from the shape of packed codes."""
    global_scale: torch.Tensor | None = None
    """Divisor of all scales of an NVFP4 weight, fp32 [1]; None for other schemes."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint suffix, tensor) pairs in checkpoint order.

        For example ("weight_packed", int32 [O, I/8]).
        """
        is_packed = self.codes.dtype in (torch.int32, torch.uint8)
        yield ("weight_packed" if is_packed else "weight"), self.codes
        if self.scale is not None:
            yield "weight_scale", self.scale
        if self.scheme.packs_integers:
            yield "weight_shape", torch.tensor(self.shape, dtype=torch.int64)
        if self.global_scale is not None:
            yield "weight_global_scale", self.global_scale
        if self.scheme.input_global_scale is not None:
            factor = torch.full((1,), self.scheme.input_global_scale, dtype=torch.float32)
            yield "input_global_scale", factor

    def buffers(self) -> list[torch.Tensor]:
        """Return the tensors that each version overwrites: codes and, if the scheme has them,
        scales.
        """
        tensors = (self.codes, self.scale, self.global_scale)
        return [tensor for tensor in tensors if tensor is not None]

    def rows(self, start: int, stop: int) -> "LowBitWeight":
        """Return the weight of output rows start … stop-1, as views of the same storage.

        start and stop must be multiples of the height of a block that shares a scale.
        """
        scale = self.scale
        shape = (stop - start, self.shape[1])
        if scale is not None:
            height = self.scheme.block[0] if self.scheme.block else 1
            assert start % height == 0 == stop % height, (
                f"rows {start} to {stop} cut a block of {height} rows"
            )
            scale = scale[start // height : stop // height]
        return replace(self, codes=self.codes[start:stop], scale=scale, shape=shape)

    def stacked_on(self, other: "LowBitWeight") -> "LowBitWeight":
        """Return a copy of this weight's rows, followed by those of another of the same scheme."""
        scale = self.scale
        if scale is not None and other.scale is not None:
            scale = torch.cat((scale, other.scale))
        shape = (self.shape[0] + other.shape[0], self.shape[1])
        return replace(self, codes=torch.cat((self.codes, other.codes)), scale=scale, shape=shape)

    def columns(self, part: int, parts: int) -> "LowBitWeight":
        """Return the weight of one of `parts` equal parts of the input columns.

        These are views of the same storage. A part must divide into groups, blocks, and the codes
        of an int32 (`configs.schemes.SchemeSpec.misfit`); a scale per row is every part's.
        """

        def own(tensor: torch.Tensor) -> torch.Tensor:
            width = tensor.shape[1] // parts
            return tensor[:, part * width : (part + 1) * width]

        scale = self.scale
        if scale is not None and scale.shape[1] > 1:
            scale = own(scale)
        shape = (self.shape[0], self.shape[1] // parts)
        return replace(self, codes=own(self.codes), scale=scale, shape=shape)

    def without_codes(self, scales: bool) -> "LowBitWeight":
        """Return a copy whose codes are on the meta device, without values.

        scales: whether the copy has the same scales. Otherwise they are on the meta device, too.
        """
        codes = torch.empty_like(self.codes, device="meta")
        scale = self.scale
        if scale is not None and not scales:
            scale = torch.empty_like(scale, device="meta")
        return replace(self, codes=codes, scale=scale)

    def overwrite(self, other: "LowBitWeight") -> "LowBitWeight":
        """Copy another weight of the same scheme, shape and dtypes into this one's buffers.

        Returns this weight.
        """
        for ours, theirs in zip(self.buffers(), other.buffers(), strict=True):
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            assert ours.device == theirs.device
            ours.copy_(theirs)
        return self

    @property
    def _bits(self) -> int:
        """Bits of a packed integer code; 0 if codes are floats or are not packed."""
        args = self.scheme.weights
        return args.num_bits if args is not None and self.scheme.packs_integers else 0

    def unpacked(self) -> torch.Tensor:
        """Return the codes one per element, [O, I].

        Integers come as int8, fp4 codes as their fp32 values, other codes as they are stored.
        """
        return _unpacked(self.codes, self._bits)

    def wide_scale(self) -> torch.Tensor:
        """Return the factors that codes are multiplied with, fp32, in the shape of `scale`.

        The weight must be quantized.
        """
        assert self.scale is not None
        return _wide(self.scale, self.global_scale)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return code · scale, computed in fp32 and rounded once to `dtype`, [O, I].

        The fp32 product is exact except for NVFP4's two-level scale. On GPUs with a compiler,
        torch.compile makes it in one pass, with the same bits.
        """
        if self.scale is None:
            return self.codes.to(dtype)
        height = self.scheme.block[0] if self.scheme.block else 1
        compiles = self.codes.is_cuda and compiler_missing("cuda") is None
        multiply = compiled(_multiplied) if compiles else _multiplied
        return multiply(self.codes, self.scale, self.global_scale, self._bits, height, dtype)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes one per element. bits: see `LowBitWeight._bits`."""
    if bits:
        return integer.unpack(codes, bits)
    return fp4.decode(codes) if codes.dtype == torch.uint8 else codes


def _wide(scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """Return stored scales as fp32 factors."""
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
    """Return code · scale in `dtype`, [O, I].

    bits: see `LowBitWeight._bits`. height: rows that share a scale.
    """
    values = _unpacked(codes, bits).to(torch.float32)
    scale = _wide(scale, global_scale)
    if height > 1:
        scale = scale.repeat_interleave(height, dim=0)
    grouped = values.view(values.shape[0], scale.shape[1], -1)
    return (grouped * scale.unsqueeze(-1)).view(values.shape).to(dtype)


def empty(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> LowBitWeight:
    """Return uninitialized CPU buffers of a weight, for an integer scheme or fp8 with a scale per
    row.

    shape: (O, I). dtype: compute dtype, in which scales are stored.
    """
    args = scheme.weights
    rows, columns = shape
    assert args is not None
    assert is_integer(args) or args.num_bits == 8
    code_dtype = torch.int8 if is_integer(args) else torch.float8_e4m3fn
    width = columns
    if scheme.packs_integers:
        code_dtype = torch.int32
        width = columns * args.num_bits // 32
    groups = columns // (scheme.group_size or columns)
    codes = torch.empty((rows, width), dtype=code_dtype)
    return LowBitWeight(scheme, codes, torch.empty((rows, groups), dtype=dtype), shape)
