"""e4m3 codes with a scale a row, or a scale a block of rows and columns.

Source: compressed-tensors 0.17 `calculate_qparams`, `_quantize`, `_process_block`.
Axes: O output rows, I input columns, P block rows, Q block columns.
"""

import torch

from quant.materialize.scales import finite_absmax, stored_scale
from quant.schemes import FP8_MAX, Scheme


def quantize(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: fp32 or bf16 [O, I] → codes float8_e4m3fn [O, I], scale in `dtype`: [O, 1] a row, [P, Q] a block.

    The scale is absmax / 448; codes are weight / scale, clamped, rounded to the nearest e4m3.
    """
    rows, columns = scheme.block or (1, weight.shape[1])
    blocks = weight.reshape(weight.shape[0] // rows, rows, -1, columns).transpose(1, 2)
    scale = stored_scale(finite_absmax(blocks.flatten(2), layer), FP8_MAX, dtype, layer)
    codes = (blocks / scale[..., None, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.transpose(1, 2).reshape(weight.shape), scale
