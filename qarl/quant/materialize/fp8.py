"""Quantize weights to e4m3 codes with a scale per row, or per block of rows and columns.

Source: compressed-tensors 0.17 `calculate_qparams`, `_quantize`, `_process_block`.
Axes: O output rows, I input columns, P block rows, Q block columns.
"""

import torch

from qarl.quant.materialize.scales import absmax, stored_scale
from qarl.quant.schemes import FP8_MAX


def quantize(
    weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a weight to e4m3 codes.

    The scale is absmax / 448. A code is weight / scale, clamped and rounded to the nearest e4m3.
    As for integers, nothing is checked here (`check_scale`).

    Args:
        weight: fp32, bf16 or fp16 [O, I].
        rows: rows of a block that shares a scale.
        columns: columns of that block.
        dtype: dtype of scales.

    Returns:
        Codes float8_e4m3fn [O, I], scales [P, Q] and absmax [P, Q].
    """
    largest = row_maxima(weight, columns).unflatten(0, (-1, rows)).amax(dim=1)
    scale = stored_scale(largest, FP8_MAX, dtype)
    return encode(weight, scale.repeat_interleave(rows, dim=0)), scale, largest


def row_maxima(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the largest magnitude of each row in every block of columns, [O, Q]."""
    return absmax(weight.unflatten(1, (-1, columns)))


def encode(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return weight / scale, clamped and rounded to the nearest e4m3, float8_e4m3fn [O, I].

    scale: [O, Q], a row's scales of its blocks of columns.
    """
    blocks = weight.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
    return blocks.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).flatten(1)


def fp8_values(values: torch.Tensor) -> torch.Tensor:
    """Round values to the nearest e4m3, in their own dtype; values beyond ±448 saturate."""
    return values.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)
