"""Count the low-bit codes that a materialization changes.

This is the part of the masters' movement that the sampler can see. A master moves a little at every
step, and its code changes when it crosses the midpoint between two codes. Codes are compared as
they are stored, packed codes one by one. The floating-point codes -0 and 0 count as different. A
scale that moves under unchanged codes does not count.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qarl.quant.materialize import LowBitWeight
from qarl.quant.materialize.experts import LowBitExperts

_CHUNK_BYTES = 1 << 20
"""Bytes of codes compared at a time."""


@dataclass
class Changed:
    """Number of items that changed, out of a total."""

    changed: int = 0
    """Number of items that differ from before."""
    count: int = 0
    """Number of items that were compared."""

    def add(self, changed: int, count: int) -> None:
        """Add `changed` changed items out of `count` to the totals."""
        self.changed += changed
        self.count += count

    @property
    def share(self) -> float | None:
        """Fraction of the items that changed; None if nothing was compared."""
        return self.changed / self.count if self.count else None


class FlipCount(Changed):
    """Number of codes that changed over any number of materializations.

    Layers in the compute dtype have no codes.
    """

    @contextlib.contextmanager
    def over(self, low_bit: LowBitWeight | LowBitExperts | None) -> Iterator[None]:
        """Count the codes of `low_bit` that a materialization into its buffers changes.

        The materialization runs within this context, which copies the old codes first.
        """
        weights = quantized_weights(low_bit)
        before = [weight.codes.clone() for weight in weights]
        yield
        for old, weight in zip(before, weights, strict=True):
            self.add(changed_codes(old, weight), weight.shape[0] * weight.shape[1])


def changed_codes(before: torch.Tensor, weight: LowBitWeight) -> int:
    """Return how many codes of a weight differ from `before`, its codes of an earlier version."""
    old = before.reshape(-1).view(torch.uint8)
    new = weight.codes.reshape(-1).view(torch.uint8)
    # Fewer bytes than codes: there are two codes per byte, in int32 words too.
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
    """Return the fewest weights that hold all codes of a layer.

    There is one for each of the layer's masters, or one per expert and matrix if scales span
    matrices, and none if the layer is not quantized.
    """
    weights: list[LowBitWeight] = []
    if isinstance(low_bit, LowBitWeight):
        weights = [low_bit]
    elif low_bit is not None and low_bit.stacks:
        weights = list(low_bit.stacks)
    elif low_bit is not None:
        weights = [w for expert in low_bit.experts for w in (expert.gate_up, expert.down)]
    return [weight for weight in weights if weight.scheme.weights is not None]
