"""e4m3 codes with a scale a row, or a scale a block of rows and columns.

Source: compressed-tensors 0.17 `calculate_qparams`, `_quantize`, `_process_block`.
Axes: O output rows, I input columns, P block rows, Q block columns.
"""

import torch

from qarl.quant.materialize.scales import absmax, stored_scale
from qarl.quant.schemes import FP8_MAX


def quantize(
    weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight: fp32 or bf16 [O, I]; rows, columns: of a block that shares a scale; dtype: of scales.

    Returns codes float8_e4m3fn [O, I], scale and absmax [P, Q]. The scale is absmax / 448; codes
    are weight / scale, clamped, rounded to the nearest e4m3. As for integers, nothing is checked
    here.
    """
    blocks = weight.reshape(weight.shape[0] // rows, rows, -1, columns).transpose(1, 2)
    largest = absmax(blocks.flatten(2))
    scale = stored_scale(largest, FP8_MAX, dtype)
    codes = (blocks / scale[..., None, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.transpose(1, 2).reshape(weight.shape), scale, largest


def fp8_values(values: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 of each value, those beyond its range at its ends, in the dtype they came
    in.
    """
    return values.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)
