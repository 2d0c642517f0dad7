"""Absolute maxima of masters, and scales as they are stored."""

import torch

from configs.errors import PrecisionError


def absmax(values: torch.Tensor) -> torch.Tensor:
    """max |v| over the last axis, in the master's dtype."""
    low, high = torch.aminmax(values, dim=-1)
    return torch.maximum(high, -low)


def finite_absmax(values: torch.Tensor, layer: str) -> torch.Tensor:
    """`absmax`. Raises `PrecisionError` where it is not finite."""
    found = absmax(values)
    check_finite(found, layer)
    return found


def stored_scale(absmax: torch.Tensor, half_range: float, dtype: torch.dtype) -> torch.Tensor:
    """absmax / half_range in `dtype`, as compressed-tensors stores it; zeros get the master dtype's epsilon.

    Not finite where it is beyond `dtype`'s range: `check_scale`.
    """
    # By a tensor: CUDA multiplies by the reciprocal of a number, and would store other scales than a CPU.
    scale = absmax / torch.full((), half_range, dtype=absmax.dtype, device=absmax.device)
    scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps).to(dtype)
    # A scale that vanished in the cast (float16 ends at 6e-8) becomes the smallest the library itself would store.
    return scale.masked_fill(scale == 0, torch.finfo(torch.float32).eps)


def check_finite(absmax: torch.Tensor, layer: str) -> None:
    """Raise `PrecisionError` for masters whose maxima are not finite."""
    if not torch.isfinite(absmax).all():
        raise PrecisionError(
            f"layer {layer!r}: a master weight holds NaN or infinity and cannot be quantized; at a run's start the "
            "model's own files hold it: take another copy; later training has diverged: resume from a checkpoint with "
            "a lower learner.optimizer.lr (--lr)"
        )


def check_scale(absmax: torch.Tensor, scale: torch.Tensor, layer: str) -> None:
    """Raise `PrecisionError` where masters are not finite, or a scale is beyond its dtype's range."""
    check_finite(absmax, layer)
    if not torch.isfinite(scale).all():
        raise PrecisionError(
            f"layer {layer!r}: a master weight of magnitude {float(absmax.max()):.3g} has a scale beyond "
            f"{scale.dtype}'s range; use bfloat16 as the compute dtype (--dtype bfloat16)"
        )
