"""Dynamic per-token activation quantization, as the engine's kernels do it.

The backward of W8A8 and FP8 keeps these codes and scales (9 to 8 bits a value) instead of a compute-dtype copy.
Axes: N tokens, I input columns.
"""

from dataclasses import dataclass

import torch

from quant.schemes import Scheme, is_integer

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP8_MIN_SCALE = 1.0 / (_FP8_MAX * 512.0)


@dataclass(frozen=True)
class LowBitActivation:
    """codes: int8 or float8_e4m3fn [N, I]; scale: fp32 [N, 1]."""

    codes: torch.Tensor
    scale: torch.Tensor

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """code · scale in fp32, rounded once to `dtype`, [N, I]."""
        return (self.codes.to(torch.float32) * self.scale).to(dtype)


@torch.no_grad()
def quantize_activation(x: torch.Tensor, scheme: Scheme) -> LowBitActivation:
    """x: compute dtype [N, I]; scheme must quantize activations.

    int8: scale absmax/127, codes round-half-even(x · (1/scale)), vLLM `dynamic_scaled_int8_quant` on CPU.
    fp8: scale max(absmax/448, 1/(448·512)), codes from x · (1/scale), vLLM `QuantFP8.forward_native`.
    """
    args = scheme.activations
    assert args is not None, f"scheme {scheme.name!r} does not quantize activations"
    values = x.to(torch.float32)
    absmax = values.abs().amax(dim=-1, keepdim=True)
    if is_integer(args):
        scale = absmax / 127.0
        inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
        return LowBitActivation((values * inverse).round_().clamp_(-128, 127).to(torch.int8), scale)
    scale = (absmax / _FP8_MAX).clamp_min(_FP8_MIN_SCALE)
    codes = (values * scale.reciprocal()).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return LowBitActivation(codes, scale)
