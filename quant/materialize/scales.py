"""Absolute maxima of masters, and scales as they are stored."""

import torch


def finite_absmax(values: torch.Tensor, layer: str) -> torch.Tensor:
    """max |v| over the last axis, in the master's dtype. Raises `ValueError` where it is not finite."""
    low, high = torch.aminmax(values, dim=-1)
    absmax = torch.maximum(high, -low)
    if not torch.isfinite(absmax).all():
        raise ValueError(
            f"layer {layer!r}: a master weight holds NaN or infinity and cannot be quantized; resume from a checkpoint"
        )
    return absmax


def stored_scale(absmax: torch.Tensor, half_range: float, dtype: torch.dtype, layer: str) -> torch.Tensor:
    """absmax / half_range in `dtype`, as compressed-tensors stores it; zeros get the master dtype's epsilon.

    Raises `ValueError` where the scale is beyond `dtype`'s range.
    """
    scale = absmax / half_range
    scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps).to(dtype)
    if not torch.isfinite(scale).all():
        raise ValueError(
            f"layer {layer!r}: a master weight of magnitude {float(absmax.max()):.3g} has a scale beyond {dtype}'s "
            "range; use bfloat16 as the compute dtype (--dtype bfloat16)"
        )
    # A scale that vanished in the cast (float16 ends at 6e-8) becomes the smallest the library itself would store.
    return scale.masked_fill(scale == 0, torch.finfo(torch.float32).eps)
