"""Rounding of an fp32 value to a 16-bit master: to the nearest, or stochastically without bias.

At a learning rate of 1e-6 an update is about 5e-5 of a weight, and the steps of bfloat16 are 4e-3
to 8e-3 of it. Rounded to the nearest, almost no update arrives (docs/guide/precision.md). A
stochastic master moves by a whole step in about one of a hundred updates, and its expectation is
the fp32 value.
"""

from typing import Literal

import torch

Rounding = Literal["nearest", "stochastic"]
_FLOAT16_TINY = 2.0**-14
"""Smallest normal number of float16."""
_FLOAT16_STEP = 2.0**-24
"""Distance of float16's subnormal numbers."""


def stochastic_round(
    values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Round fp32 of any shape to one of its two neighbours in `dtype`, at random.

    The nearer neighbour is chosen more often, so that the expectation is the value. This is exact
    for bfloat16 and for float16's normal numbers: as many random bits as there are bits to drop are
    added, and the sum is truncated. float16 numbers below 2^-14 have steps of 2^-24; their odds are
    exact to 2^-24. Infinity and NaN are unchanged.

    generator: generator on the device of `values`.
    """
    dropped = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    bits = values.view(torch.int32)
    noise = _random_16_bits(bits, generator).bitwise_right_shift_(16 - dropped)
    truncated = noise.add_(bits).bitwise_and_(-(1 << dropped)).view(torch.float32)
    rounded = torch.where(values.isfinite(), truncated, values).to(dtype)
    if dtype != torch.float16:
        return rounded
    tiny = values.abs() < _FLOAT16_TINY
    if not tiny.any():
        return rounded
    steps = values[tiny] / _FLOAT16_STEP
    down = steps.floor()
    up = torch.rand(steps.shape, generator=generator, device=steps.device) < steps - down
    rounded[tiny] = ((down + up) * _FLOAT16_STEP).to(dtype)
    return rounded


def _random_16_bits(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random int32 in [0, 2^16), of the shape of `like`.

    Each random int64 gives four of them.
    """
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[: like.numel()].view(like.shape)
    # The mask undoes the sign extension of int16.
    return bits.to(torch.int32).bitwise_and_(0xFFFF)
