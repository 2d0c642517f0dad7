"""Muon, and AdamW for the rest, over masters that ZeRO 1 and 2 have dealt to processes in flat pieces.

Momentum is elementwise, so each process keeps that of its pieces. The orthogonalization needs whole matrices: their
updates are put together in one process each, in turn, orthogonalized there, and handed back.

The arithmetic is that of `MasterStep`: gradients are clipped before, each expert's gate and up are matrices of their
own, and the update has AdamW's size. DeepSpeed's own Muon clips what is orthogonalized already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.master_step import muon
from qarl.learner.optim.muon import MOMENTUM, in_turns
from qarl.learner.optim.optimizer import flat_span, matrices_of
from qarl.learner.processes import Processes


@dataclass(frozen=True)
class Piece:
    """What one process has of a master. start, stop: of the master's elements in row-major order, equal where it has
    none. at: of the first of them in the flat tensor that is stepped."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class _Matrix:
    """rows, columns; start: its first element, of its master's."""

    piece: Piece
    rows: int
    columns: int
    start: int

    def here(self) -> tuple[slice, slice]:
        """What this process has of it: in the matrix's elements, and in the flat tensor."""
        first = max(self.start, self.piece.start)
        count = max(0, min(self.start + self.rows * self.columns, self.piece.stop) - first)
        inside, at = first - self.start, self.piece.at + first - self.piece.start
        return slice(inside, inside + count), slice(at, at + count)


class PartitionedMuon(torch.optim.AdamW):
    """Param groups with `whole` True are Muon's, the others AdamW's. DeepSpeed replaces the parameters of both by flat
    fp32 tensors, one or more a group; `place` then says what is where."""

    def __init__(
        self, matrices: dict[str, nn.Parameter], rest: list[nn.Parameter], config: OptimizerConfig, processes: Processes
    ):
        groups: list[dict[str, Any]] = [{"params": list(matrices.values()), "whole": True}]
        groups += [{"params": rest, "whole": False}] if rest else []
        super().__init__(groups, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, fused=True)
        self._masters, self._config, self._processes = matrices, config, processes
        self._matrices: dict[int, list[_Matrix]] = {}

    def place(self, pieces: dict[str, tuple[torch.Tensor, Piece]]) -> None:
        """pieces: of each of Muon's masters, the flat tensor it is part of and this process's piece. All processes name
        the same masters in the same order, those too that they have nothing of."""
        for name, (flat, piece) in pieces.items():
            shape = self._masters[name].shape
            for index in matrices_of(name, shape):
                start, (rows, columns) = flat_span(shape, index)
                self._matrices.setdefault(id(flat), []).append(_Matrix(piece, rows, columns, start))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every group that has parameters. All processes come here together."""
        groups = self.param_groups
        for group in groups:
            for flat in group["params"] if group["whole"] else ():
                self._step_matrices(flat, group["lr"], group["weight_decay"])
        self.param_groups = [group for group in groups if not group["whole"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, flat: torch.Tensor, lr: float, weight_decay: float) -> None:
        state, gradient, momentum = self.state[flat], flat.grad, self._config.momentum
        if gradient is None:
            return
        if not state:
            state[MOMENTUM] = torch.zeros_like(flat)
        # Nesterov momentum and decoupled weight decay are elementwise: each process has them for its own pieces.
        update = gradient.lerp(state[MOMENTUM].lerp_(gradient, 1 - momentum), momentum)
        flat.mul_(1 - lr * weight_decay)
        # As many matrices at a time as there are processes, so that every process has one to orthogonalize and none
        # keeps more than one whole update.
        for turn in in_turns(self._matrices[id(flat)], self._processes.world):
            mine = self._put_together(turn, update)
            if mine is not None:
                mine = self._orthogonalized(mine, lr)
            for owner, matrix in enumerate(turn):
                shape = (matrix.rows, matrix.columns)
                step = mine if owner == self._processes.rank else torch.empty(shape, device=flat.device)
                assert step is not None
                dist.broadcast(step, owner)
                inside, here = matrix.here()
                flat[here] += step.flatten()[inside]

    def _put_together(self, turn: Sequence[_Matrix], update: torch.Tensor) -> torch.Tensor | None:
        """The matrix of this turn that is this process's, fp32 [rows, columns]; None where there are fewer."""
        mine = None
        for owner, matrix in enumerate(turn):
            whole = torch.zeros(matrix.rows * matrix.columns, device=update.device)
            inside, here = matrix.here()
            whole[inside] = update[here]
            dist.reduce(whole, owner)  # every element has one summand that is not zero
            if owner == self._processes.rank:
                mine = whole.view(matrix.rows, matrix.columns)
        return mine

    def _orthogonalized(self, update: torch.Tensor, lr: float) -> torch.Tensor:
        """What torch's Muon adds to a matrix for this update: fp32 [rows, columns]."""
        step = nn.Parameter(torch.zeros_like(update))
        step.grad = update
        alone = {"lr": lr, "weight_decay": 0.0, "momentum": 0.0}  # both are applied to the pieces already
        muon([step], self._config.model_copy(update=alone)).step()
        return step.detach()


def pieces_of(zero: Any, masters: dict[str, nn.Parameter], rank: int) -> dict[str, tuple[torch.Tensor, Piece]]:
    """What `PartitionedMuon.place` is given. zero: DeepSpeed's optimizer, where Muon's is the first param group."""
    flat, pieces = zero.single_partition_of_fp32_groups[0], {}
    for name, master in masters.items():
        mapping: Any = master._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            pieces[name] = (flat, Piece(0, 0, 0))
            continue
        start, at = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
        pieces[name] = (flat, Piece(start, start + mapping.lp_fragment_address.numel, at))
    return pieces
