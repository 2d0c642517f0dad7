"""Absolute maxima of masters, and scales as they are stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qarl.configs.errors import PrecisionError


@dataclass(frozen=True)
class _Extremes:
    """Of a layer's weights and of its scales, 0-d tensors each."""

    layer: str
    absmax: torch.Tensor
    scale: torch.Tensor


_later: list[_Extremes] | None = None
"""What `checked_together` is to look at; None outside of it."""


@contextmanager
def checked_together() -> Iterator[None]:
    """Within this context checks of weights on a GPU are put off to its end, so that the host waits
    for the device once and not for every layer. Raises what they would have raised, of the first
    layer.
    """
    global _later
    before, _later = _later, []
    try:
        yield
        _look(_later)
    finally:
        _later = before


def _look(extremes: list[_Extremes]) -> None:
    pairs = [
        torch.stack([one.absmax.to(torch.float32), one.scale.to(torch.float32)]) for one in extremes
    ]
    finite = torch.stack(pairs).isfinite().all(dim=1).tolist() if pairs else []
    for one, fine in zip(extremes, finite, strict=True):
        if not fine:
            _check(one.absmax, one.scale, one.layer)


def absmax(values: torch.Tensor) -> torch.Tensor:
    """max |v| over the last axis, in the master's dtype."""
    low, high = torch.aminmax(values, dim=-1)
    return torch.maximum(high, -low)


def finite_absmax(values: torch.Tensor, layer: str) -> torch.Tensor:
    """`absmax`. Raises `PrecisionError` where it is not finite."""
    maxima = absmax(values)
    check_scale(maxima, maxima.new_zeros(1), layer)
    return maxima


def stored_scale(absmax: torch.Tensor, half_range: float, dtype: torch.dtype) -> torch.Tensor:
    """absmax / half_range in `dtype`, as compressed-tensors stores it; zeros get the master dtype's
    epsilon.

    Not finite where it is beyond `dtype`'s range: `check_scale`.
    """
    # By a tensor: CUDA multiplies by the reciprocal of a number, and would store other scales than
    # a CPU.
    scale = absmax / torch.full((), half_range, dtype=absmax.dtype, device=absmax.device)
    scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps).to(dtype)
    # A scale that vanished in the cast (float16 ends at 6e-8) becomes the smallest the library
    # itself would store.
    return scale.masked_fill(scale == 0, torch.finfo(torch.float32).eps)


def check_scale(absmax: torch.Tensor, scale: torch.Tensor, layer: str) -> None:
    """Raise `PrecisionError` where masters are not finite, or a scale is beyond its dtype's
    range.
    """
    if _later is not None and absmax.is_cuda:  # maxima pass NaN on
        _later.append(_Extremes(layer, absmax.max(), scale.max()))
    else:
        _check(absmax, scale, layer)


def _check(absmax: torch.Tensor, scale: torch.Tensor, layer: str) -> None:
    if not torch.isfinite(absmax).all():
        raise PrecisionError(
            f"layer {layer!r}: a master weight holds NaN or infinity and cannot be quantized; at a"
            " run's start the model's own files hold it: take another copy; later training has"
            " diverged: resume from a checkpoint with a lower learner.optimizer.lr (--lr)"
        )
    if not torch.isfinite(scale).all():
        raise PrecisionError(
            f"layer {layer!r}: a master weight of magnitude {float(absmax.max()):.3g} has a scale"
            f" beyond {scale.dtype}'s range; use bfloat16 as the compute dtype (--dtype bfloat16)"
        )
