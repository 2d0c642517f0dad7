"""Fused expert masters → every expert's low-bit tensors, under the names checkpoints give them.

Axes: E experts, H hidden columns, I expert columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quant.layout import ExpertLayout
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
    """A layer's experts in their checkpoint order."""

    experts: tuple[LowBitExpert, ...]

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
    gate_up: torch.Tensor, down: torch.Tensor, scheme: Scheme, dtype: torch.dtype, layer: str
) -> LowBitExperts:
    """Quantize a layer's experts. gate_up: master [E, 2I, H]; down: master [E, H, I]; dtype: compute dtype.

    Unless a scale spans a whole matrix (gate and up then share it), a stack is one pass into one buffer, of which every
    expert's tensors are views. Raises what `materialize` raises.
    """
    pairs = zip(*(_matrices(stack, scheme, dtype, layer) for stack in (gate_up, down)), strict=True)
    return LowBitExperts(tuple(LowBitExpert(g, d) for g, d in pairs))


def _matrices(stack: torch.Tensor, scheme: Scheme, dtype: torch.dtype, layer: str) -> list[LowBitWeight]:
    experts, rows, columns = stack.shape
    if scheme.fuses_scales:
        return [materialize(matrix, scheme, dtype, layer) for matrix in stack]
    whole = materialize(stack.detach().reshape(experts * rows, columns), scheme, dtype, layer)
    return [whole.rows(e * rows, (e + 1) * rows) for e in range(experts)]
