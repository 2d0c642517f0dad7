"""Quantize weights to e2m1 codes, two per byte, with the scales of NVFP4 or MXFP4.

e2m1 has the values ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}. NVFP4 has an e4m3 scale for each 16 columns and
one fp32 scale for the tensor. MXFP4 has a scale 2^k for each 32 columns. Nothing here is stored in
the compute dtype.

Source: compressed-tensors 0.17 `generate_gparam`, `generate_mx_scales`, `calculate_qparams`,
`cast_to_fp4`, `pack_fp4_to_uint8`.
Axes: O output rows, I input columns, Q quantization groups.
"""

import torch

from qarl.configs.errors import PrecisionError
from qarl.quant.materialize.integer import halves
from qarl.quant.materialize.scales import absmax, finite_absmax
from qarl.quant.schemes import FP4_MAX, FP8_MAX, Scheme, SchemeError

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 … 7."""
_SMALLEST_SCALE = 0.125
"""Scale that compressed-tensors stores for a group whose e4m3 scale rounds to zero."""


def _edges() -> torch.Tensor:
    """Return the largest value that each code but the last takes, fp32 [7].

    These are the midpoints between codes. A tie goes to the even code.
    """
    values = torch.tensor(_VALUES)
    middle = (values[1:] + values[:-1]) / 2
    # A midpoint above an odd code belongs to the next code, which is even.
    odd = torch.arange(7) % 2 == 1
    return torch.where(odd, torch.nextafter(middle, torch.zeros(())), middle)


_EDGES = _edges()


def check_master(weight: torch.Tensor, scheme: str, layer: str) -> None:
    """Raise `SchemeError` if the master is float16.

    Scales are computed in the master's dtype, as in compressed-tensors, and float16's range is too
    narrow for them. NVFP4's tensor-wide scale, 2688 / absmax, is infinite in float16 (and stored as
    1) below an absmax of 0.041. MXFP4's powers of two are zero below 2^-24.
    """
    if weight.dtype == torch.float16:
        raise SchemeError(
            f"scheme {scheme!r}: layer {layer!r} has a float16 master, whose range is too narrow"
            " for the scales of fp4 codes; set learner.master_dtype to 'bfloat16' or 'float32'"
        )


def check_range(weight: torch.Tensor, dtype: torch.dtype, layer: str) -> None:
    """Raise `PrecisionError` if a dequantized weight would be beyond the compute dtype's range."""
    largest = float(finite_absmax(weight.flatten(), layer))
    if largest > torch.finfo(dtype).max:
        raise PrecisionError(
            f"layer {layer!r}: a master weight of magnitude {largest:.3g} is beyond {dtype}'s"
            " range; use bfloat16 as the compute dtype (--dtype bfloat16)"
        )


def quantize_nvfp4(
    weight: torch.Tensor, scheme: Scheme, largest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight to NVFP4.

    A weight is code · scale / global scale. The global scale spreads the scales over e4m3's range.

    Args:
        weight: fp32 or bf16 [O, I].
        scheme: scheme of the result, for its group size.
        largest: largest magnitude in this weight and those fused with it, scalar in the master's
            dtype.

    Returns:
        Codes uint8 [O, I/2], scales float8_e4m3fn [O, Q], global scale fp32 [1].
    """
    grouped = weight.view(weight.shape[0], -1, scheme.group_size or 0)
    smallest = torch.finfo(largest.dtype).tiny
    ratio = FP8_MAX * FP4_MAX / largest.clamp_min(smallest)
    global_scale = ratio.nan_to_num(posinf=1.0).to(torch.float32).view(1)
    exact_scale = global_scale * (absmax(grouped) / FP4_MAX)
    scale = exact_scale.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    fp32 = scale.to(torch.float32)
    fp32 = fp32.masked_fill(fp32 == 0, _SMALLEST_SCALE)
    codes = encode((grouped / (fp32 / global_scale).unsqueeze(-1)).view(weight.shape))
    return codes, fp32.to(torch.float8_e4m3fn), global_scale


def quantize_mxfp4(
    weight: torch.Tensor, scheme: Scheme, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight, fp32 or bf16 [O, I], to MXFP4.

    The exponent is that of absmax / 4, rounded up if the mantissa is 1.75 or more, so that absmax
    falls into e2m1's range. Raises `PrecisionError` if the weight is not finite.

    Returns codes uint8 [O, I/2] and biased exponents uint8 [O, Q].
    """
    grouped = weight.view(weight.shape[0], -1, scheme.group_size or 0)
    bits = finite_absmax(grouped, layer).to(torch.float32).view(torch.int32)
    # Adding a quarter of the mantissa's range carries into the exponent from 1.75 on.
    exponent = (((bits + (1 << 21)) >> 23) - 2).clamp_min(0).to(torch.uint8)
    scale = power_of_two(exponent).to(weight.dtype).unsqueeze(-1)
    codes = encode((grouped / scale).view(weight.shape).to(torch.float32))
    return codes, exponent


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^(e - 127) of biased exponents (uint8, below 255), exact, fp32."""
    bits = exponent.to(torch.int32) << 23
    # 2^-127 is a subnormal fp32: its exponent bits are zero, and the highest mantissa bit is set.
    return torch.where(exponent == 0, 1 << 22, bits).view(torch.float32)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest e2m1 codes of fp32 values [O, I], uint8 [O, I/2], first column in the low
    half.

    Values beyond ±6 saturate. A negative value that rounds to zero keeps its sign, as in
    compressed-tensors and on GPUs.
    """
    index = torch.bucketize(values.abs(), _EDGES.to(values.device), out_int32=True).to(torch.uint8)
    index |= (values < 0).to(torch.uint8) << 3
    return index[:, 0::2] | (index[:, 1::2] << 4)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, uint8 [O, I/2] → fp32 [O, I]; the inverse of `encode`."""
    index = halves(codes).to(torch.int32)
    table = torch.tensor((*_VALUES, *(-v for v in _VALUES)), device=codes.device)
    return table[index]
