"""Compute absolute maxima of masters, and the scales that are stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from qarl.configs.errors import PrecisionError


@dataclass(frozen=True)
class _Extremes:
    """Largest weight and largest scale of a layer, whose check is deferred."""

    layer: str
    """Name of the layer."""
    absmax: torch.Tensor
    """Largest magnitude of its weights, 0-d."""
    scale: torch.Tensor
    """Largest of its scales, 0-d."""


_deferred: list[_Extremes] | None = None
"""Checks deferred to the end of `checked_together`; None outside that context."""


@contextmanager
def checked_together() -> Iterator[None]:
    """Defer the checks of weights on a GPU to the end of this context.

    The host then waits for the device once instead of once per layer. Raises the error of the first
    layer that fails.
    """
    global _deferred
    outer = _deferred
    _deferred = []
    try:
        yield
        _look(_deferred)
    finally:
        _deferred = outer


def _look(extremes: list[_Extremes]) -> None:
    """Run deferred checks, after one copy of all their results to the host."""
    if not extremes:
        return
    pairs = [torch.stack([one.absmax.float(), one.scale.float()]) for one in extremes]
    finite = torch.stack(pairs).isfinite().all(dim=1).tolist()
    for one, is_finite in zip(extremes, finite, strict=True):
        if not is_finite:
            _check(one.absmax, one.scale, one.layer)


def absmax(values: torch.Tensor) -> torch.Tensor:
    """Return max |v| over the last axis, in the master's dtype."""
    low, high = torch.aminmax(values, dim=-1)
    return torch.maximum(high, -low)


def finite_absmax(values: torch.Tensor, layer: str) -> torch.Tensor:
    """Return `absmax(values)`. Raises `PrecisionError` if it is not finite."""
    maxima = absmax(values)
    check_scale(maxima, maxima.new_zeros(1), layer)
    return maxima


def stored_scale(absmax: torch.Tensor, half_range: float, dtype: torch.dtype) -> torch.Tensor:
    """Return absmax / half_range in `dtype`, as compressed-tensors stores it.

    Zeros are replaced by the master dtype's epsilon. A scale beyond `dtype`'s range is infinite;
    `check_scale` refuses it.
    """
    # Divide by a tensor: to divide by a number, CUDA multiplies with its reciprocal and would store
    # other scales than a CPU.
    scale = absmax / torch.full((), half_range, dtype=absmax.dtype, device=absmax.device)
    scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps).to(dtype)
    # A scale that the cast rounded to zero (float16's smallest is 6e-8) becomes the smallest scale
    # that compressed-tensors itself would store.
    return scale.masked_fill(scale == 0, torch.finfo(torch.float32).eps)


def check_scale(absmax: torch.Tensor, scale: torch.Tensor, layer: str) -> None:
    """Raise `PrecisionError` if masters are not finite or a scale is beyond its dtype's range.

    Within `checked_together`, checks on a GPU are deferred.
    """
    if _deferred is not None and absmax.is_cuda:
        # One value of each is enough, because `max` propagates NaN.
        _deferred.append(_Extremes(layer, absmax.max(), scale.max()))
    else:
        _check(absmax, scale, layer)


def _check(absmax: torch.Tensor, scale: torch.Tensor, layer: str) -> None:
    """Check now; see `check_scale`."""
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
