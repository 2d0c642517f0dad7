"""The optimizer step of one master: torch's own, on the master or on a temporary fp32 copy of it.

Moments are fp32 for masters of every dtype. A 16-bit master is converted to fp32, stepped, and
rounded back. So besides masters, gradients and moments a step needs memory for one master only.
With offload the moments are in host memory between steps and are copied to the master's device for
their step. The arithmetic is the same, bit for bit.
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
from qarl.quant.runtime.shards import Shard, own_rows

Index = tuple[int | slice, ...]
"""Index of one matrix in a master."""

_CHUNK = 1 << 22
"""Number of weights that are compared at a time, to bound the memory of their bfloat16 copies."""


@dataclass(frozen=True)
class UpdateCounts:
    """Effect of an update on one master. All are int64 scalars on the master's device."""

    meant: torch.Tensor
    """Number of weights that the optimizer meant to move: their momentum is not zero."""
    lost: torch.Tensor
    """Number of those whose stored value did not change."""
    crossed: torch.Tensor
    """Number of weights that round to another bfloat16 than before."""


class ParameterOptimizer:
    """Optimizer of one master.

    Args:
        indices: the master's matrices for Muon; empty for AdamW.
        rounding: rounding of a 16-bit master.
        generator: generator of stochastic rounding, on the master's device.
        offload: device of the moments between steps. None: that of the master.
        cut: shard of a matrix for Muon of which this process has some rows. `muon.orthogonalize`
            must then be called before each step.
    """

    def __init__(
        self,
        master: nn.Parameter,
        indices: list[Index],
        config: OptimizerConfig,
        rounding: Rounding,
        generator: torch.Generator | None,
        offload: torch.device | None = None,
        cut: Shard | None = None,
    ):
        self._master = master
        self._rounding = rounding
        self._generator = generator
        self._offload = offload
        self._indices = indices or [(slice(None),) * min(1, master.ndim)]
        ndim = 2 if indices else master.ndim
        self._nothing = torch.empty((0,) * ndim, device=master.device)
        self._parts = [nn.Parameter(self._nothing) for _ in self._indices]
        """Parameters that torch's optimizer steps: views of the master during a step, empty between
        steps.
        """
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        """Offload buffers of the moments during a step, by (id of the state, key)."""
        self.cut = cut
        self._optimizer: torch.optim.Optimizer
        if not indices:
            # Fused: one pass over master, gradient and moments, without a temporary of their size.
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

    @property
    def _rows(self) -> torch.Tensor:
        """The values that this process steps: the master, or its rows of a shared one."""
        return own_rows(self._master.detach())

    @torch.no_grad()
    def step(self, lr: float, diagnose: bool = False) -> UpdateCounts | None:
        """Step at that learning rate, if there is a gradient.

        Returns the effect of the update if `diagnose`.
        """
        if self._master.grad is None:
            return None
        gradient = own_rows(self._master.grad)
        before = self._rows.clone() if diagnose else None
        with self._ready(gradient) as fp32:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._store(fp32)
            return None if before is None else self._counts(before)

    @property
    def row_muon(self) -> RowMuon:
        """The optimizer of a cut matrix."""
        assert isinstance(self._optimizer, RowMuon)
        return self._optimizer

    @torch.no_grad()
    def update(self) -> torch.Tensor:
        """Add the gradient of a cut matrix to its momentum.

        Returns the update to orthogonalize, bfloat16 [o, I].
        """
        assert self._master.grad is not None
        with self._ready(own_rows(self._master.grad)):
            return self.row_muon.update()

    @contextmanager
    def _ready(self, gradient: torch.Tensor) -> Iterator[torch.Tensor]:
        """Prepare parts, gradients and moments for a step, and release them after it.

        Yields the master in fp32: itself, or a copy of a 16-bit one.
        """
        fp32 = self._rows.to(torch.float32)
        for part, index in zip(self._parts, self._indices, strict=True):
            part.data = fp32[index]
            part.grad = gradient[index].to(torch.float32)
        self._fetch_moments()
        yield fp32
        for part in self._parts:
            part.grad = None
            part.data = self._nothing
        self._offload_moments()

    def in_range(self) -> torch.Tensor | None:
        """Return whether a 16-bit master is finite throughout; None for an fp32 one.

        The result is a scalar on the master's device. It takes one pass and no copy, because the
        extremes of a tensor with a NaN are NaN.
        """
        master = self._rows
        if master.dtype == torch.float32:
            return None
        if not master.numel():  # a shard without a row
            return torch.ones((), dtype=torch.bool, device=master.device)
        return torch.stack(torch.aminmax(master)).isfinite().all()

    def _store(self, fp32: torch.Tensor) -> None:
        """Round the stepped copy into the master. An fp32 master was stepped in place."""
        master = self._rows
        if master.dtype == torch.float32:
            return
        if self._rounding == "nearest":
            master.copy_(fp32)
        else:
            assert self._generator is not None
            master.copy_(stochastic_round(fp32, master.dtype, self._generator))

    def _counts(self, before: torch.Tensor) -> UpdateCounts:
        """Return the effect of the update. before: the master before it."""
        same = self._rows == before
        meant = torch.zeros((), dtype=torch.int64, device=same.device)
        lost = torch.zeros_like(meant)
        for part, index in zip(self._parts, self._indices, strict=True):
            state = self._optimizer.state[part]
            momentum = state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]
            moved = momentum != 0
            # Not `sum`, which on CPUs widens its argument to int64, twice a master, to count it.
            meant += moved.count_nonzero()
            lost += (moved & same[index]).count_nonzero()
        return UpdateCounts(meant, lost, crossed_bfloat16(before, self._rows))

    def _moments(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield (state, key, tensor) of each moment, a tensor as large as its part.

        AdamW's step count is a scalar and is never offloaded.
        """
        for state in self._optimizer.state.values():
            # A copy, because callers replace the tensors while they iterate.
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor) and value.ndim:
                    yield state, key, value

    def _fetch_moments(self) -> None:
        """Copy the offloaded moments to the master's device. The offload buffers stay allocated."""
        if self._offload is None:
            return
        self._buffers = {(id(state), key): tensor for state, key, tensor in self._moments()}
        for state, key, tensor in self._moments():
            state[key] = tensor.to(self._master.device, copy=True)

    def _offload_moments(self) -> None:
        """Copy the moments back to the offload buffers.

        The first call allocates them, pinned for CUDA.
        """
        if self._offload is None:
            return
        pinned = self._master.device.type == "cuda" and self._offload.type == "cpu"
        for state, key, tensor in self._moments():
            buffer = self._buffers.get((id(state), key))
            if buffer is None:
                buffer = torch.empty(
                    tensor.shape,
                    dtype=tensor.dtype,
                    device=self._offload,
                    pin_memory=pinned,
                )
            state[key] = buffer.copy_(tensor)
        self._buffers = {}

    def moments(self) -> dict[str, torch.Tensor]:
        """Return torch's state by key, empty before the first step.

        Moments have the shape of the values that this process steps. Those of several matrices are
        copied into one tensor in host memory.
        """
        shape = self._rows.shape
        moments: dict[str, torch.Tensor] = {}
        for part, index in zip(self._parts, self._indices, strict=True):
            for key, value in self._optimizer.state.get(part, {}).items():
                if value.ndim in (0, len(shape)):
                    moments[key] = value
                else:
                    if key not in moments:
                        moments[key] = torch.empty(shape, dtype=value.dtype)
                    moments[key][index] = value
        return moments

    @torch.no_grad()
    def load_moments(self, moments: dict[str, torch.Tensor]) -> None:
        """Restore the `moments` of the same values, which are used from now on, not copied."""
        for part, index in zip(self._parts, self._indices, strict=True):
            # On the master's device, step counts too, because the fused AdamW needs it so.
            self._optimizer.state[part] = {
                key: (value[index] if value.ndim else value).to(self._master.device)
                for key, value in moments.items()
            }
        self._buffers = {}
        self._offload_moments()


def crossed_bfloat16(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return how many weights round to another bfloat16 than before.

    That is what a sampler in bfloat16 can see of an update. Both tensors have the same shape; the
    result is an int64 scalar on their device.
    """
    crossed = torch.zeros((), dtype=torch.int64, device=after.device)
    chunks = zip(before.flatten().split(_CHUNK), after.flatten().split(_CHUNK), strict=True)
    for old, new in chunks:
        crossed += (old.to(torch.bfloat16) != new.to(torch.bfloat16)).count_nonzero()
    return crossed


def muon(
    parts: list[nn.Parameter],
    config: OptimizerConfig,
    kind: type[torch.optim.Muon] = torch.optim.Muon,
) -> torch.optim.Muon:
    """Return torch's Muon as configured, with updates of AdamW's size.

    parts: [rows, columns] each. kind: class of the optimizer.
    """
    return kind(
        parts,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
