"""Fused expert masters → every expert's low-bit tensors, under the names checkpoints give them.

Axes: E experts, H hidden columns, I expert columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quant.checkpoint.families import ExpertLayout
from quant.materialize import LowBitWeight, materialize
from quant.schemes import Scheme


@dataclass(frozen=True)
class LowBitExpert:
    """One expert. gate_up: [2I, H], gate rows first. down: [H, I]."""

    gate_up: LowBitWeight
    down: LowBitWeight

    def tensors(self, layout: ExpertLayout) -> Iterator[tuple[str, torch.Tensor]]:
        """("gate_proj.weight_packed", tensor) and so on: views of what the forward multiplies."""
        rows = self.gate_up.shape[0] // 2
        parts = (self.gate_up.rows(0, rows), self.gate_up.rows(rows, 2 * rows), self.down)
        for projection, part in zip(layout.projections, parts, strict=True):
            for suffix, tensor in part.tensors():
                yield f"{projection}.{suffix}", tensor


@dataclass(frozen=True)
class LowBitExperts:
    """A layer's experts in their checkpoint order.

    stacks: gate and up of all experts [E · 2I, H], and down [E · H, I], of which the experts' are views; None where
    each matrix was materialized alone.
    """

    experts: tuple[LowBitExpert, ...]
    stacks: tuple[LowBitWeight, LowBitWeight] | None = None

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.experts[0].down.codes.device

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
) -> LowBitExperts:
    """Quantize a layer's experts. gate_up: master [E, 2I, H]; down: master [E, H, I]; dtype: compute dtype.

    Unless a scale spans a whole matrix (gate and up then share it), a stack is one pass into one buffer, of which every
    expert's tensors are views. out: an earlier result, whose buffers are written again and returned. scales: of the two
    stacks, where they are kept (see `materialize`). Raises what `materialize` raises.
    """
    masters = (gate_up.detach(), down.detach())
    if scheme.fuses_scales:
        kept = zip(*((e.gate_up, e.down) for e in out.experts), strict=True) if out else ([None] * len(gate_up),) * 2
        made = [
            [materialize(matrix, scheme, dtype, layer, out=into) for matrix, into in zip(stack, outs, strict=True)]
            for stack, outs in zip(masters, kept, strict=True)
        ]
        return LowBitExperts(tuple(LowBitExpert(g, d) for g, d in zip(*made, strict=True)))
    flat = [stack.reshape(-1, stack.shape[2]) for stack in masters]
    if out is not None:
        assert out.stacks is not None
        for stack, into, scale in zip(flat, out.stacks, scales, strict=True):
            materialize(stack, scheme, dtype, layer, out=into, scale=scale)
        return out
    first, second = (
        materialize(stack, scheme, dtype, layer, scale=scale) for stack, scale in zip(flat, scales, strict=True)
    )
    views = zip(*(_split(whole, len(gate_up)) for whole in (first, second)), strict=True)
    return LowBitExperts(tuple(LowBitExpert(g, d) for g, d in views), (first, second))


def _split(whole: LowBitWeight, experts: int) -> list[LowBitWeight]:
    """The matrices of a stack, as views."""
    rows = whole.shape[0] // experts
    return [whole.rows(e * rows, (e + 1) * rows) for e in range(experts)]
