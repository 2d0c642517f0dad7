"""One master's optimizer: torch's own, on the master itself or on an fp32 copy that lives for one
step.

Moments are fp32 for masters of every dtype. A 16-bit master is widened, stepped, and rounded back,
so what a step needs beyond masters, gradients and moments is one master's size. With offload the
moments lie in the host's memory between steps and visit the master's device for their step: the
arithmetic is the same, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.optim.muon import RowMuon, StackedMuon
from qarl.learner.optim.rounding import Rounding, stochastic_round
from qarl.quant.runtime.shards import Shard

Index = tuple[int | slice, ...]

_CHUNK = 1 << 22
"""Weights that are rounded at once to be compared."""


@dataclass(frozen=True)
class UpdateCounts:
    """meant: weights the optimizer meant to move (its momentum there is not zero). lost: those of
    them whose stored value is what it was. crossed: weights that round to another bfloat16 than
    before. All int64 scalars on the master's device.
    """

    meant: torch.Tensor
    lost: torch.Tensor
    crossed: torch.Tensor


class MasterStep:
    """Steps one master.

    indices: its matrices for Muon, empty for AdamW. rounding: of a 16-bit master, with its
    generator (on the master's device) where that is stochastic. home: where moments lie between
    steps; None: with the master. cut: of a matrix for Muon of which this process has some rows;
    `muon.orthogonalize` then comes before each step.
    """

    def __init__(
        self,
        master: nn.Parameter,
        indices: list[Index],
        config: OptimizerConfig,
        rounding: Rounding,
        generator: torch.Generator | None,
        home: torch.device | None = None,
        cut: Shard | None = None,
    ):
        self._master, self._rounding, self._generator, self._home = (
            master,
            rounding,
            generator,
            home,
        )
        self._indices = indices or [(slice(None),) * min(1, master.ndim)]
        ndim = 2 if indices else master.ndim
        self._nothing = torch.empty((0,) * ndim, device=master.device)
        self._parts = [nn.Parameter(self._nothing) for _ in self._indices]
        self._at_home: dict[tuple[int, str], torch.Tensor] = {}
        self.cut = cut
        self._optimizer: torch.optim.Optimizer
        if not indices:
            # Fused: one pass over master, gradient and moments, with no copy as large as them.
            self._optimizer = torch.optim.AdamW(
                self._parts,
                lr=config.lr,
                weight_decay=config.weight_decay,
                betas=config.betas,
                fused=True,
            )
        elif cut is None:
            stacked = len(self._parts) > 1 and master.is_cuda
            self._optimizer = muon(
                self._parts, config, StackedMuon if stacked else torch.optim.Muon
            )
        else:
            self._optimizer = RowMuon(self._parts[0], cut, muon(self._parts, config))

    @torch.no_grad()
    def step(self, lr: float, diagnose: bool = False) -> UpdateCounts | None:
        """Step at that learning rate, if there is a gradient. Returns what became of the update if
        `diagnose`.
        """
        gradient = self._master.grad
        if gradient is None:
            return None
        before = self._master.detach().clone() if diagnose else None
        with self._at_hand(gradient) as fp32:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._store(fp32)
            return None if before is None else self._counts(before)

    @property
    def row_muon(self) -> RowMuon:
        """Of a cut matrix."""
        assert isinstance(self._optimizer, RowMuon)
        return self._optimizer

    @torch.no_grad()
    def update(self) -> torch.Tensor:
        """Of a cut matrix: take its gradient into the momentum; what is to be orthogonalized,
        bfloat16 [o, I].
        """
        assert self._master.grad is not None
        with self._at_hand(self._master.grad):
            return self.row_muon.update()

    @contextmanager
    def _at_hand(self, gradient: torch.Tensor) -> Iterator[torch.Tensor]:
        """The master in fp32, itself or a copy of a 16-bit one, with parts, their gradients and
        moments there; all of it is let go of at the end of the `with`.
        """
        fp32 = self._master.detach().to(torch.float32)
        for part, index in zip(self._parts, self._indices, strict=True):
            part.data = fp32[index]
            part.grad = gradient[index].to(torch.float32)
        self._fetch()
        yield fp32
        for part in self._parts:
            part.grad = None
            part.data = self._nothing
        self._send_home()

    def in_range(self) -> torch.Tensor | None:
        """Whether a 16-bit master holds finite numbers alone, a scalar on its device; None for an
        fp32 one. One pass without a copy: the extremes of a tensor with a NaN are NaN.
        """
        master = self._master.detach()
        if master.dtype == torch.float32:
            return None
        if not master.numel():  # a shard without a row
            return torch.ones((), dtype=torch.bool, device=master.device)
        return torch.stack(torch.aminmax(master)).isfinite().all()

    def _store(self, fp32: torch.Tensor) -> None:
        """Round the stepped copy into the master; an fp32 master was stepped in place."""
        master = self._master.detach()
        if master.dtype == torch.float32:
            return
        if self._rounding == "nearest":
            master.copy_(fp32)
        else:
            assert self._generator is not None
            master.copy_(stochastic_round(fp32, master.dtype, self._generator))

    def _counts(self, before: torch.Tensor) -> UpdateCounts:
        same = self._master.detach() == before
        meant, lost = (torch.zeros((), dtype=torch.int64, device=same.device) for _ in range(2))
        for part, index in zip(self._parts, self._indices, strict=True):
            state = self._optimizer.state[part]
            moved = (state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]) != 0
            # Not `sum`, which on CPUs widens its argument to int64, twice a master, to count it.
            meant += moved.count_nonzero()
            lost += (moved & same[index]).count_nonzero()
        return UpdateCounts(meant, lost, crossed_bfloat16(before, self._master.detach()))

    def _moments(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """(state, key, tensor) of what is as large as the master; AdamW's step count is not, and
        stays there.
        """
        for state in self._optimizer.state.values():
            yield from (
                (state, k, v)
                for k, v in list(state.items())
                if isinstance(v, torch.Tensor) and v.ndim
            )

    def _fetch(self) -> None:
        """Bring the moments to the master, leaving their home in place."""
        if self._home is not None:
            self._at_home = {(id(state), key): tensor for state, key, tensor in self._moments()}
            for state, key, tensor in self._moments():
                state[key] = tensor.to(self._master.device, copy=True)

    def _send_home(self) -> None:
        """Write the moments back to their home; the first time it is made, page-locked for CUDA."""
        if self._home is not None:
            for state, key, tensor in self._moments():
                kept = self._at_home.get((id(state), key))
                if kept is None:
                    pinned = self._master.device.type == "cuda" and self._home.type == "cpu"
                    kept = torch.empty(
                        tensor.shape,
                        dtype=tensor.dtype,
                        device=self._home,
                        pin_memory=pinned,
                    )
                state[key] = kept.copy_(tensor)
            self._at_home = {}

    def state_dict(self) -> dict[str, Any]:
        """moments: torch's state of each matrix, or of the whole, empty before the first step."""
        return {"moments": [dict(self._optimizer.state.get(part, {})) for part in self._parts]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict` of the same master, rounding and optimizer."""
        for part, moments in zip(self._parts, state["moments"], strict=True):
            # Copies, where the fused AdamW wants them, step counts too.
            self._optimizer.state[part] = {
                k: v.to(self._master.device, copy=True) for k, v in moments.items()
            }
        self._at_home = {}
        self._send_home()


def crossed_bfloat16(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """How many weights round to another bfloat16 than before: of an update, what a sampler in
    bfloat16 can see. Both of one shape; an int64 scalar on their device.
    """
    crossed = torch.zeros((), dtype=torch.int64, device=after.device)
    for old, new in zip(before.flatten().split(_CHUNK), after.flatten().split(_CHUNK), strict=True):
        crossed += (old.to(torch.bfloat16) != new.to(torch.bfloat16)).count_nonzero()
    return crossed


def muon(
    parts: list[nn.Parameter],
    config: OptimizerConfig,
    kind: type[torch.optim.Muon] = torch.optim.Muon,
) -> torch.optim.Muon:
    """torch's Muon as configured, with updates of AdamW's size. parts: [rows, columns] each. kind:
    which does it.
    """
    return kind(
        parts,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def on_host(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies in the host's memory, so that no GPU has more than one master's moments whole at
    once.
    """
    return [
        {key: value.to("cpu", copy=True) for key, value in of_matrix.items()}
        for of_matrix in moments
    ]
