"""Bytes a layer takes in a checkpoint, without its weight.

Axes: O output rows, I input columns.
"""

import torch

from qarl.quant.schemes import Scheme, is_integer

_WEIGHT_SHAPE_BYTES = 2 * 8
_GLOBAL_SCALE_BYTES = 4


def stored_bytes(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Bytes of all of `LowBitWeight.tensors()` for a weight of `shape` (O, I), scales included.

    dtype: compute dtype. Raises `SchemeError` for a shape the scheme cannot hold.
    """
    args, (rows, columns) = scheme.weights, shape
    if args is None:
        return rows * columns * dtype.itemsize
    scheme.check_layer("weight", shape)
    packed = scheme.packs_integers or (args.num_bits == 4 and not is_integer(args))
    code_bytes = rows * columns * (args.num_bits if packed else 8) // 8
    block_rows = scheme.block[0] if scheme.block else 1
    scales = (rows // block_rows) * (columns // (scheme.group_size or columns))
    scale_bytes = scales * (args.scale_dtype or dtype).itemsize
    shape_bytes = _WEIGHT_SHAPE_BYTES if scheme.packs_integers else 0
    global_scales = int(scheme.fuses_scales) + int(scheme.input_global_scale is not None)
    return code_bytes + scale_bytes + shape_bytes + _GLOBAL_SCALE_BYTES * global_scales
