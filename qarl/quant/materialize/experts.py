"""Fused expert masters → every expert's low-bit tensors, under the names checkpoints give them.

Axes: E experts, H hidden columns, I expert columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qarl.quant.checkpoint.families import ExpertLayout
from qarl.quant.materialize import LowBitWeight, materialize
from qarl.quant.runtime.shards import Shard
from qarl.quant.schemes import Scheme


@dataclass(frozen=True)
class LowBitExpert:
    """One expert. gate_up: [2I, H], gate rows first. down: [H, I]."""

    gate_up: LowBitWeight
    down: LowBitWeight

    def tensors(self, layout: ExpertLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """("gate_proj.weight_packed", tensor) and so on: views of what the forward multiplies."""
        rows = self.gate_up.shape[0] // 2
        parts = (
            self.gate_up.rows(0, rows),
            self.gate_up.rows(rows, 2 * rows),
            self.down,
        )
        for projection, part in zip(layout.projections, parts, strict=True):
            for suffix, tensor in part.tensors():
                yield f"{projection}.{suffix}", tensor


@dataclass(frozen=True)
class LowBitExperts:
    """A layer's experts in their checkpoint order.

    stacks: gate and up of all experts [E · 2I, H], and down [E · H, I], of which the experts' are
    views; None where each matrix was materialized alone.
    """

    experts: tuple[LowBitExpert, ...]
    stacks: tuple[LowBitWeight, LowBitWeight] | None = None

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.experts[0].down.codes.device

    def without_codes(self) -> "LowBitExperts":
        """See `LowBitWeight.without_codes`."""
        experts = tuple(
            LowBitExpert(e.gate_up.without_codes(), e.down.without_codes()) for e in self.experts
        )
        return LowBitExperts(
            experts,
            self.stacks and (self.stacks[0].without_codes(), self.stacks[1].without_codes()),
        )

    def tensors(self, layout: ExpertLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """("0.gate_proj.weight_packed", tensor) and so on, expert by expert."""
        for number, expert in enumerate(self.experts):
            for name, tensor in expert.tensors(layout):
                yield f"{number}.{name}", tensor


def materialize_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str,
    out: LowBitExperts | None = None,
    scales: Sequence[torch.Tensor | None] = (None, None),
    shards: Sequence[Shard | None] = (None, None),
) -> LowBitExperts:
    """Quantize a layer's experts. gate_up: master [E, 2I, H]; down: master [E, H, I]; dtype:
    compute dtype.

    Unless a scale spans a whole matrix (gate and up then share it), a stack is one pass into one
    buffer, of which every expert's tensors are views. out: an earlier result, whose buffers are
    written again and returned. scales: of the two stacks, where they are kept (see `materialize`).
    shards: where the masters are this process's experts alone; what comes out is whole. Raises what
    `materialize` raises.
    """
    masters = (gate_up.detach(), down.detach())
    if scheme.fuses_scales:
        kept = (
            list(zip(*((e.gate_up, e.down) for e in out.experts), strict=True))
            if out
            else [None, None]
        )
        weights = [
            [
                materialize(
                    matrix,
                    scheme,
                    dtype,
                    layer,
                    out=outs[number] if outs else None,
                    shard=part,
                )
                for number, (matrix, part) in enumerate(_matrices(stack, shard))
            ]
            for stack, shard, outs in zip(masters, shards, kept, strict=True)
        ]
        return LowBitExperts(tuple(LowBitExpert(g, d) for g, d in zip(*weights, strict=True)))
    flat = [stack.flatten(0, 1) for stack in masters]
    old = out.stacks if out is not None and out.stacks is not None else (None, None)
    first, second = (
        materialize(stack, scheme, dtype, layer, out=into, scale=scale, shard=shard)
        for stack, shard, into, scale in zip(flat, shards, old, scales, strict=True)
    )
    if out is not None:
        return out
    experts = len(gate_up) if shards[0] is None else shards[0].shape[0]
    views = zip(_split(first, experts), _split(second, experts), strict=True)
    return LowBitExperts(tuple(LowBitExpert(g, d) for g, d in views), (first, second))


def _matrices(
    stack: torch.Tensor, shard: Shard | None
) -> Iterator[tuple[torch.Tensor, Shard | None]]:
    """Every expert's matrix: of a stack with a shard, all of it in one process and no row
    elsewhere.
    """
    if shard is None:
        yield from ((matrix, None) for matrix in stack)
        return
    rows, columns = shard.shape[1:]
    for expert in range(shard.shape[0]):
        edges = tuple(0 if edge <= expert else rows for edge in shard.edges)
        here = edges[shard.rank] < edges[shard.rank + 1]
        matrix = stack[expert - shard.edges[shard.rank]] if here else stack.new_empty((0, columns))
        yield matrix, Shard(torch.Size((rows, columns)), shard.rank, edges)


def _split(whole: LowBitWeight, experts: int) -> list[LowBitWeight]:
    """The matrices of a stack, as views."""
    rows = whole.shape[0] // experts
    return [whole.rows(e * rows, (e + 1) * rows) for e in range(experts)]
