"""torch's Muon for matrices of which each process has some rows, and for many matrices of one
shape.

Momentum and weight decay are elementwise, so each process computes them for its own rows. An update
is orthogonalized whole: as many matrices at a time as there are processes, one by each process.
Rows are sent as bfloat16 in both directions. This loses nothing, because torch's orthogonalization
begins with a cast to bfloat16 and ends in it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch has no public names for these two.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from qarl.quant.runtime.shards import Shard

MOMENTUM = "momentum_buffer"
"""Key of the momentum in the optimizer's state, as in torch's Muon."""
_ELEMENTS = 1 << 26
"""Number of elements orthogonalized at once: 128 MiB in bfloat16, with three times that in
temporary memory.
"""


class RowMuon(torch.optim.Optimizer):
    """torch's Muon of one matrix in two halves.

    Between them all processes orthogonalize the update (`orthogonalize`).

    Args:
        rows: this process's rows, fp32 [o, I].
        settings: torch's Muon with the same settings. Values and state are those that it would
            have.
    """

    def __init__(self, rows: nn.Parameter, shard: Shard, settings: torch.optim.Muon):
        super().__init__([rows], settings.defaults)
        self.shard = shard
        self.direction: Tensor | None = None
        """This process's rows of the orthogonalized update, bfloat16 [o, I]; None between steps."""

    @property
    def _rows(self) -> nn.Parameter:
        """This process's rows, fp32 [o, I]."""
        return self.param_groups[0]["params"][0]

    def update(self) -> Tensor:
        """Add the gradient to the momentum.

        Returns the update to orthogonalize, bfloat16 [o, I].
        """
        gradient = self._rows.grad
        group = self.param_groups[0]
        assert gradient is not None
        state = self.state[self._rows]
        if not state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        momentum = state[MOMENTUM].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).bfloat16()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the rows along `direction`."""
        group = self.param_groups[0]
        direction = self.direction
        assert direction is not None
        self.direction = None
        self._rows.mul_(1 - group["lr"] * group["weight_decay"])
        lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], self.shard.shape)
        self._rows.add_(direction, alpha=-lr)

    def orthogonalized(self, matrix: Tensor) -> Tensor:
        """Return a whole matrix orthogonalized, bfloat16 [O, I]."""
        group = self.param_groups[0]
        return _zeropower_via_newtonschulz(
            matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )


def orthogonalize(optimizers: Sequence[RowMuon], updates: Sequence[Tensor]) -> None:
    """Set the `direction` of each optimizer. Collective: all processes call it together.

    There are at most as many matrices as processes. The first matrix is orthogonalized by the first
    process, and so on.

    updates: this process's rows of each matrix.
    """
    shard = optimizers[0].shard
    owned: Tensor | None = None
    if shard.rank < len(optimizers):
        owned = updates[0].new_empty(optimizers[shard.rank].shard.shape)
        optimizers[shard.rank].shard.rows(owned).copy_(updates[shard.rank])
    _exchange(optimizers, updates, owned, to_owner=True)
    directions = [torch.empty_like(update) for update in updates]
    if owned is not None:
        owned = optimizers[shard.rank].orthogonalized(owned).contiguous()
        directions[shard.rank].copy_(optimizers[shard.rank].shard.rows(owned))
    _exchange(optimizers, directions, owned, to_owner=False)
    for optimizer, direction in zip(optimizers, directions, strict=True):
        optimizer.direction = direction


def _exchange(
    optimizers: Sequence[RowMuon],
    rows: Sequence[Tensor],
    owned: Tensor | None,
    to_owner: bool,
) -> None:
    """Send every owner the rows of its matrix, or the rows back.

    Args:
        rows: this process's rows of each owner's matrix.
        owned: the whole matrix that this process owns; None if it owns none.
        to_owner: the direction.
    """
    rank = optimizers[0].shard.rank
    world = len(optimizers[0].shard.edges) - 1
    # This process's rows go to the owners, and rows of its own matrix come; or the reverse.
    with_owner, with_others = (dist.isend, dist.irecv) if to_owner else (dist.irecv, dist.isend)
    operations = [
        dist.P2POp(with_owner, part.view(torch.uint8), owner)
        for owner, part in enumerate(rows)
        if owner != rank and part.numel()
    ]
    if owned is not None:
        for other in range(world):
            part = optimizers[rank].shard.rows(owned, other)
            if other != rank and part.numel():
                operations.append(dist.P2POp(with_others, part.view(torch.uint8), other))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


class StackedMuon(torch.optim.Muon):
    """Muon for many matrices of one shape, such as a layer's experts, with one product for all on a
    GPU.

    Values, settings and state are those of torch's Muon, except for the last bits of products in
    bfloat16.

    params: fp32 [R, C] each, all of one shape, either all with a gradient or none.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. See `torch.optim.Muon.step`."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step parameters of one shape and group, which all have a gradient."""
        foreach: Any = torch  # whose functions over many tensors have no public names
        gradients = [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        momenta = [self.state[p][MOMENTUM] for p in parameters]
        foreach._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        lr = group["lr"]
        count = max(1, _ELEMENTS // parameters[0].numel())
        foreach._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        step = -_adjust_lr(lr, group["adjust_lr_fn"], parameters[0].shape)
        for start in range(0, len(parameters), count):
            part = slice(start, start + count)
            updates = momenta[part]
            if group["nesterov"]:
                updates = foreach._foreach_lerp(gradients[part], momenta[part], group["momentum"])
            stacked = torch.stack([*updates]).bfloat16()
            settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
            newton_schulz = torch.vmap(_zeropower_via_newtonschulz, in_dims=(0, None, None, None))
            directions = newton_schulz(stacked, *settings).to(torch.float32)
            foreach._foreach_add_(parameters[part], [*directions.unbind()], alpha=step)
