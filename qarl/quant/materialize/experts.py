"""Quantize fused expert masters to every expert's low-bit tensors, under their checkpoint names.

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
    """Weights of one expert."""

    gate_up: LowBitWeight
    """Gate and up projection, [2I, H], gate rows first; [I, H] without a gate."""
    down: LowBitWeight
    """Down projection, [H, I]."""

    @property
    def gate(self) -> LowBitWeight:
        """Gate projection, [I, H], a view."""
        return self.gate_up.rows(0, self.gate_up.shape[0] // 2)

    @property
    def up(self) -> LowBitWeight:
        """Up projection, [I, H], a view."""
        rows = self.gate_up.shape[0] // 2
        return self.gate_up.rows(rows, 2 * rows)

    def of_rank(self, rank: int, ranks: int) -> "LowBitExpert":
        """Return what one of `ranks` ranks has: its rows of gate and up, its columns of down.

        The expert must have a gate; `quant.graph.kinds.undivided` refuses others.
        """
        rows = self.gate.shape[0] // ranks
        start = rank * rows
        gate, up = (part.rows(start, start + rows) for part in (self.gate, self.up))
        return LowBitExpert(gate.stacked_on(up), self.down.columns(rank, ranks))

    def tensors(self, layout: ExpertLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("gate_proj.weight_packed", tensor) and so on: views of what the forward uses.

        Of gpt-oss, whose rows of gate and up alternate, they are ("w13_weight_packed", tensor) and
        so on, the names that vLLM's loader has for one expert's tensors.
        """
        if layout.transposed:
            for name, matrix in (("w13", self.gate_up), ("w2", self.down)):
                for suffix, tensor in matrix.tensors():
                    if suffix != "weight_shape":  # that loader does not know it
                        yield f"{name}_{suffix}", tensor
            return
        parts = (self.gate, self.up, self.down) if layout.gated else (self.gate_up, self.down)
        for projection, part in zip(layout.projections, parts, strict=True):
            for suffix, tensor in part.tensors():
                yield f"{projection}.{suffix}", tensor


@dataclass(frozen=True)
class LowBitExperts:
    """Experts of one layer."""

    experts: tuple[LowBitExpert, ...]
    """The experts, in checkpoint order."""
    stacks: tuple[LowBitWeight, LowBitWeight] | None = None
    """Gate and up projections of all experts, [E · 2I, H], and down projections, [E · H, I].

    The weights in `experts` are views of these. None if each matrix was quantized on its own.
    """

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.experts[0].down.codes.device

    def of_rank(self, rank: int, ranks: int) -> "LowBitExperts":
        """Return what one of `ranks` ranks has of every expert."""
        return LowBitExperts(tuple(expert.of_rank(rank, ranks) for expert in self.experts))

    def without_codes(self, scales: bool) -> "LowBitExperts":
        """Return a copy without codes; see `LowBitWeight.without_codes`."""
        experts = tuple(
            LowBitExpert(e.gate_up.without_codes(scales), e.down.without_codes(scales))
            for e in self.experts
        )
        if self.stacks is None:
            return LowBitExperts(experts)
        gate_up, down = self.stacks
        return LowBitExperts(experts, (gate_up.without_codes(scales), down.without_codes(scales)))

    def tensors(self, layout: ExpertLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("0.gate_proj.weight_packed", tensor) and so on, expert by expert."""
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
    """Quantize a layer's experts.

    Each stack is quantized in one pass into one buffer, and every expert's tensors are views of it.
    A scheme with a scale per matrix, which gate and up then share, quantizes each matrix on its
    own. Raises what `materialize` raises.

    Args:
        gate_up: master [E, 2I, H], or [E, I, H] without a gate; with a shard, this process's
            experts of it.
        down: master [E, H, I]; with a shard, this process's experts of it.
        scheme: scheme of the result.
        dtype: compute dtype.
        layer: name of the layer, for error messages.
        out: earlier result, whose buffers are overwritten and returned.
        scales: scales of the two stacks to use; None for scales of the extremes. See `materialize`.
        shards: experts that each process has of the two stacks. The result has all experts in every
            process.
    """
    masters = (gate_up.detach(), down.detach())
    if scheme.fuses_scales:
        old_gate_up = None if out is None else [expert.gate_up for expert in out.experts]
        old_down = None if out is None else [expert.down for expert in out.experts]
        gate_ups = _materialize_each(masters[0], scheme, dtype, layer, old_gate_up, shards[0])
        downs = _materialize_each(masters[1], scheme, dtype, layer, old_down, shards[1])
        return _paired(gate_ups, downs)
    flat = [stack.flatten(0, 1) for stack in masters]
    old = out.stacks if out is not None and out.stacks is not None else (None, None)
    first, second = (
        materialize(stack, scheme, dtype, layer, out=buffer, scale=scale, shard=shard)
        for stack, shard, buffer, scale in zip(flat, shards, old, scales, strict=True)
    )
    if out is not None:
        return out
    experts = len(gate_up) if shards[0] is None else shards[0].shape[0]
    return _paired(_split(first, experts), _split(second, experts), (first, second))


def _paired(
    gate_ups: Sequence[LowBitWeight],
    downs: Sequence[LowBitWeight],
    stacks: tuple[LowBitWeight, LowBitWeight] | None = None,
) -> LowBitExperts:
    """Return the experts with these weights."""
    pairs = zip(gate_ups, downs, strict=True)
    return LowBitExperts(tuple(LowBitExpert(gate_up, down) for gate_up, down in pairs), stacks)


def _materialize_each(
    stack: torch.Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    layer: str,
    out: Sequence[LowBitWeight] | None,
    shard: Shard | None,
) -> list[LowBitWeight]:
    """Quantize every expert's matrix of a stack on its own, into the weights `out` if given."""
    weights = []
    for number, (matrix, part) in enumerate(_matrices(stack, shard)):
        buffer = None if out is None else out[number]
        weights.append(materialize(matrix, scheme, dtype, layer, out=buffer, shard=part))
    return weights


def _matrices(
    stack: torch.Tensor, shard: Shard | None
) -> Iterator[tuple[torch.Tensor, Shard | None]]:
    """Yield every expert's matrix and its shard.

    If the stack has a shard, one process has all rows of a matrix and the others have none.
    """
    if shard is None:
        yield from ((matrix, None) for matrix in stack)
        return
    rows, columns = shard.shape[1:]
    for expert in range(shard.shape[0]):
        edges = tuple(0 if edge <= expert else rows for edge in shard.edges)
        if edges[shard.rank] < edges[shard.rank + 1]:
            matrix = stack[expert - shard.edges[shard.rank]]
        else:
            matrix = stack.new_empty((0, columns))
        yield matrix, Shard(torch.Size((rows, columns)), shard.rank, edges)


def _split(stack: LowBitWeight, experts: int) -> list[LowBitWeight]:
    """Return the matrices of a stack, as views."""
    rows = stack.shape[0] // experts
    return [stack.rows(e * rows, (e + 1) * rows) for e in range(experts)]
