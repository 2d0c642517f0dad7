"""How many low-bit codes a materialization changes: what of the masters' movement the sampler can
see.

A master moves a little at every step, and a code changes where that crosses the middle between two.
Codes are compared as they are stored, packed ones each by its own bits; -0 and 0 of floating-point
codes count as two, and a scale that moves under unchanged codes does not count.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts

_CHUNK_BYTES = 1 << 20


@dataclass
class Changed:
    """changed: those of `count` that are others than before."""

    changed: int = 0
    count: int = 0

    def add(self, changed: int, count: int) -> None:
        """Take in more of them."""
        self.changed += changed
        self.count += count

    @property
    def share(self) -> float | None:
        """changed of count; None of nothing."""
        return self.changed / self.count if self.count else None


class FlipCount(Changed):
    """Codes, over any number of materializations; layers in the compute dtype have none."""

    @contextlib.contextmanager
    def over(self, low_bit: LowBitWeight | LowBitExperts | None) -> Iterator[None]:
        """Count what is materialized over a layer's version within this context, which takes a copy
        of its codes.
        """
        weights = quantized_weights(low_bit)
        before = [weight.codes.clone() for weight in weights]
        yield
        for old, weight in zip(before, weights, strict=True):
            self.add(changed_codes(old, weight), weight.shape[0] * weight.shape[1])


def changed_codes(before: torch.Tensor, weight: LowBitWeight) -> int:
    """How many codes of a weight are others than in `before`, its codes of an earlier version."""
    old, new = (codes.reshape(-1).view(torch.uint8) for codes in (before, weight.codes))
    # two codes a byte, in int32 words too
    halves = old.numel() < weight.shape[0] * weight.shape[1]
    changed = torch.zeros((), dtype=torch.int64, device=old.device)
    for start in range(0, old.numel(), _CHUNK_BYTES):
        span = slice(start, start + _CHUNK_BYTES)
        differ = old[span] ^ new[span]
        parts = (differ & 0x0F, differ & 0xF0) if halves else (differ,)
        for part in parts:
            changed += part.count_nonzero()
    return int(changed)


def quantized_weights(
    low_bit: LowBitWeight | LowBitExperts | None,
) -> list[LowBitWeight]:
    """What a layer multiplies, in as few tensors as hold all its codes: one for each of its masters
    where scales are not of whole matrices; none where nothing is quantized.
    """
    if isinstance(low_bit, LowBitExperts):
        weights = list(low_bit.stacks or (w for e in low_bit.experts for w in (e.gate_up, e.down)))
    else:
        weights = [] if low_bit is None else [low_bit]
    return [weight for weight in weights if weight.scheme.weights is not None]
