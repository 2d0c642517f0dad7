"""Tensors that compressed-tensors writes for a weight, the independent source that tests compare
materialization with.
"""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qarl.quant.schemes import Scheme

FP4 = ("nvfp4a16", "nvfp4", "mxfp4a16")


def library_scale(
    weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return compressed-tensors' scale as a module holds it, and the global scale, by min-max
    observation.
    """
    args = scheme.weights
    assert args is not None
    if scheme.block:
        rows, columns = scheme.block
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        observed = blocks.transpose(1, 2).flatten(2)
    else:
        observed = weight.unflatten(1, (-1, scheme.group_size or weight.shape[1]))
    absmax = weight.abs().max().reshape(1)
    global_scale = generate_gparam(-absmax, absmax) if scheme.fuses_scales else None
    scale, _ = calculate_qparams(*torch.aminmax(observed, dim=-1), args, global_scale=global_scale)
    return (scale if scheme.name in FP4 else scale.to(dtype)), global_scale


def library(
    weight: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return the tensors that compressed-tensors' compressor of the scheme's format writes for one
    layer.
    """
    assert scheme.format is not None
    assert scheme.quantization is not None
    scale, global_scale = library_scale(weight, scheme, dtype)
    state: dict[str, torch.Tensor | None] = {"weight": weight, "weight_scale": scale}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    if scheme.activations is not None and global_scale is not None:
        state["input_global_scale"] = torch.ones(1)
    written = BaseCompressor.get_value_from_registry(scheme.format.value).compress(
        state, scheme.quantization
    )
    return {name: tensor for name, tensor in written.items() if tensor is not None}
