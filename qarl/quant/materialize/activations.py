"""Quantize activations dynamically, as the engine's kernels do.

The backward of schemes with low-bit activations keeps these codes and scales (4 to 9 bits a value)
instead of a copy in the compute dtype.

Axes: N tokens, I input columns, Q quantization groups of a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationStrategy

from qarl.quant.materialize import fp4
from qarl.quant.runtime.cpu_blocks import row_blocks
from qarl.quant.schemes import FP4_MAX, FP8_MAX, Scheme, is_integer

_FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
_FP8_MIN_GROUP_ABSMAX = 1e-10


@dataclass(frozen=True)
class LowBitActivation:
    """Activations in low bits. A value is (code - zero point) · scale."""

    codes: torch.Tensor
    """Codes: int8 or float8_e4m3fn [N, I], or e2m1 codes, two per byte, uint8 [N, I/2]."""
    scale: torch.Tensor
    """Scales [N, Q], Q = 1 per token, or the number of ranks that quantize parts of a token;
    float8_e4m3fn for e2m1 codes, else fp32.
    """
    zero_point: torch.Tensor | None = None
    """Code of zero, fp32 [N, Q]; None for symmetric codes."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Codes, scales and, if codes are asymmetric, zero points."""
        tensors = (self.codes, self.scale, self.zero_point)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def split(self, tokens: int) -> Iterator["LowBitActivation"]:
        """Yield the activations of `tokens` tokens at a time, as views."""
        parts = zip(*(tensor.split(tokens) for tensor in self.tensors), strict=True)
        return (LowBitActivation(*part) for part in parts)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        return self.codes.dtype

    def values(self) -> torch.Tensor:
        """Return codes minus their zero point, one per element, fp32 [N, I]."""
        if self.codes.dtype == torch.uint8:
            return fp4.decode(self.codes)
        values = self.codes.to(torch.float32)
        if self.zero_point is None:
            return values
        # the width is stated, because there may be no token
        width = values.shape[1] // self.zero_point.shape[1]
        grouped = values.view(*self.zero_point.shape, width)
        return (grouped - self.zero_point.unsqueeze(-1)).view(values.shape)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return value · scale, computed in fp32 and rounded once to `dtype`, [N, I]."""
        values = self.values()
        grouped = values.view(*self.scale.shape, -1)
        products = grouped * self.scale.to(torch.float32).unsqueeze(-1)
        return products.view(values.shape).to(dtype)


@torch.no_grad()
def quantize_activation(x: torch.Tensor, scheme: Scheme) -> LowBitActivation:
    """Quantize activations x, compute dtype [N, I], as the scheme says.

    The scheme must quantize activations. The formulas and their sources are:

    - int8: scale absmax/127, codes round-half-even(x · (1/scale)). vLLM's
      `dynamic_scaled_int8_quant` on CPUs.
    - int8 asymmetric: torch's `_dyn_quant_matmul_4bit`, which vLLM's `Dynamic4bitLinearKernel`
      calls.
    - fp8: scale max(absmax/448, 1/(448·512)), codes from x · (1/scale). vLLM's
      `QuantFP8.forward_native`.
    - fp8 in groups: scale max(absmax, 1e-10)/448, codes from x / scale. vLLM's
      `per_token_group_quant_fp8`.
    - e2m1 in groups: scale absmax/6 in e4m3 under the constant global scale. vLLM's
      `ref_nvfp4_quant`.
    """
    assert scheme.activations is not None, f"scheme {scheme.name!r} does not quantize activations"
    parts = [_quantize(block, scheme) for (block,) in row_blocks(x)]
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.tensors for part in parts), strict=True)
    return LowBitActivation(*map(torch.cat, columns))


def _quantize(x: torch.Tensor, scheme: Scheme) -> LowBitActivation:
    """Quantize every row of x on its own."""
    args = scheme.activations
    assert args is not None
    values = x.to(torch.float32)
    if is_integer(args):
        return _int8(values) if args.symmetric else _int8_asymmetric(values)
    if args.strategy == QuantizationStrategy.TOKEN:
        return _fp8(values)
    grouped = values.unflatten(-1, (-1, args.group_size or 0))
    if args.num_bits == 8:
        return _fp8_groups(grouped)
    return _e2m1_groups(grouped, scheme.input_global_scale)


def _int8(values: torch.Tensor) -> LowBitActivation:
    """Quantize fp32 values [N, I] to int8 with a scale per token."""
    scale = values.abs().amax(dim=-1, keepdim=True) / 127.0
    inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
    codes = (values * inverse).round_().clamp_(-128, 127).to(torch.int8)
    return LowBitActivation(codes, scale)


def _int8_asymmetric(values: torch.Tensor) -> LowBitActivation:
    """Quantize fp32 values [N, I] to int8 with a scale and a zero point per token.

    The 256 codes span min(x, 0) … max(x, 0). The end that is further from zero decides the zero
    point, which is rounded.
    """
    low = values.amin(dim=-1, keepdim=True).clamp_max(0.0)
    high = values.amax(dim=-1, keepdim=True).clamp_min(0.0)
    # Divide a tensor by a tensor: torch turns a number divided by a tensor into a product with the
    # reciprocal, which rounds differently.
    inverse = torch.where(low == high, 1.0, torch.full_like(low, 255.0) / (high - low))
    first = low * inverse
    last = high * inverse
    zero_point = torch.where((first - 128.0) + (last + 127.0) > 0, -128.0 - first, 127.0 - last)
    zero_point = zero_point.clamp_(-128.0, 127.0).round_()
    codes = (_round_half_away(values * inverse) + zero_point).clamp_(-128.0, 127.0)
    return LowBitActivation(codes.to(torch.int8), inverse.reciprocal(), zero_point)


def _round_half_away(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, halves away from zero, as C's `round` does."""
    truncated = values.trunc()
    return truncated + (values - truncated).abs().ge(0.5) * values.sign()


def _fp8(values: torch.Tensor) -> LowBitActivation:
    """Quantize fp32 values [N, I] to e4m3 with a scale per token."""
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = (largest / FP8_MAX).clamp_min(_FP8_MIN_SCALE)
    codes = (values * scale.reciprocal()).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return LowBitActivation(codes, scale)


def _fp8_groups(grouped: torch.Tensor) -> LowBitActivation:
    """Quantize fp32 values [N, Q, I/Q] to e4m3 with a scale per group."""
    scale = grouped.abs().amax(dim=-1).clamp_min(_FP8_MIN_GROUP_ABSMAX) / FP8_MAX
    quotients = grouped / scale.unsqueeze(-1)
    codes = quotients.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return LowBitActivation(codes.flatten(-2), scale)


def _e2m1_groups(grouped: torch.Tensor, global_scale: float | None) -> LowBitActivation:
    """Quantize fp32 values [N, Q, I/Q] to e2m1 with an e4m3 scale per group."""
    assert global_scale == 1.0, (
        "with another factor scale and zero groups need it in every formula below"
    )
    exact_scale = grouped.abs().amax(dim=-1) * (1.0 / FP4_MAX)
    scale = exact_scale.clamp_max(FP8_MAX).to(torch.float8_e4m3fn)
    fp32 = scale.to(torch.float32)
    inverse = torch.where(fp32 == 0, 0.0, fp32.reciprocal())
    codes = fp4.encode((grouped * inverse.unsqueeze(-1)).flatten(-2))
    return LowBitActivation(codes, scale)
