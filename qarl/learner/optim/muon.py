"""torch's Muon over matrices of which each process has some rows, and over many matrices of one
shape.

Momentum and weight decay are elementwise, and stay with the rows. An update is orthogonalized
whole: as many matrices at a time as there are processes, each of them by one. What travels is
bfloat16 both ways, and nothing is lost by it: torch's orthogonalization begins with a cast to it,
and ends in it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch has no public name for either
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from qarl.quant.runtime.shards import Shard

MOMENTUM = "momentum_buffer"
_ELEMENTS = 1 << 26
"""That are orthogonalized at once: 128 MiB in bfloat16, and three times that in between."""


class RowMuon(torch.optim.Optimizer):
    """torch's Muon of one matrix in two halves, with the orthogonalization of others' rows in
    between.

    rows: fp32 [o, I], this process's. settings: torch's Muon as it would be for them, whose values
    and state these are.
    """

    def __init__(self, rows: nn.Parameter, shard: Shard, settings: torch.optim.Muon):
        super().__init__([rows], settings.defaults)
        self.shard = shard
        self.direction: Tensor | None = None

    @property
    def _rows(self) -> nn.Parameter:
        return self.param_groups[0]["params"][0]

    def update(self) -> Tensor:
        """Take the gradient into the momentum; bfloat16 [o, I], to be orthogonalized."""
        gradient, group = self._rows.grad, self.param_groups[0]
        assert gradient is not None
        state = self.state[self._rows]
        if not state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        momentum = state[MOMENTUM].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]).bfloat16()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the rows along `direction`, bfloat16 [o, I]."""
        group, direction = self.param_groups[0], self.direction
        assert direction is not None
        self.direction = None
        self._rows.mul_(1 - group["lr"] * group["weight_decay"])
        self._rows.add_(
            direction,
            alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], self.shard.shape),
        )

    def orthogonalized(self, matrix: Tensor) -> Tensor:
        """bfloat16 [O, I] → bfloat16 [O, I]."""
        group = self.param_groups[0]
        return _zeropower_via_newtonschulz(
            matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )


def orthogonalize(optimizers: Sequence[RowMuon], updates: Sequence[Tensor]) -> None:
    """Give each of at most as many matrices as there are processes its `direction`: the first by
    the first process, and so on. updates: this process's rows of each. All processes come here
    together.
    """
    shard = optimizers[0].shard
    mine: Tensor | None = None
    if shard.rank < len(optimizers):
        mine = updates[0].new_empty(optimizers[shard.rank].shard.shape)
        optimizers[shard.rank].shard.rows(mine).copy_(updates[shard.rank])
    _exchange(optimizers, updates, mine, to_owner=True)
    directions = [torch.empty_like(update) for update in updates]
    if mine is not None:
        mine = optimizers[shard.rank].orthogonalized(mine).contiguous()
        directions[shard.rank].copy_(optimizers[shard.rank].shard.rows(mine))
    _exchange(optimizers, directions, mine, to_owner=False)
    for optimizer, direction in zip(optimizers, directions, strict=True):
        optimizer.direction = direction


def _exchange(
    optimizers: Sequence[RowMuon],
    rows: Sequence[Tensor],
    mine: Tensor | None,
    to_owner: bool,
) -> None:
    """Send every owner the rows of its matrix, or the rows back. rows: this process's of each
    owner's matrix. mine: the whole matrix this process owns.
    """
    rank, world = optimizers[0].shard.rank, len(optimizers[0].shard.edges) - 1
    send, receive = (dist.isend, dist.irecv) if to_owner else (dist.irecv, dist.isend)
    operations = [
        dist.P2POp(send, part.view(torch.uint8), owner)
        for owner, part in enumerate(rows)
        if owner != rank and part.numel()
    ]
    if mine is not None:
        parts = (
            (other, optimizers[rank].shard.rows(mine, other))
            for other in range(world)
            if other != rank
        )
        operations += [
            dist.P2POp(receive, part.view(torch.uint8), other)
            for other, part in parts
            if part.numel()
        ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


class StackedMuon(torch.optim.Muon):
    """Over many matrices of one shape, such as a layer's experts: one product for all of them on a
    GPU.

    Values, settings and state are those of torch's Muon but for the last bits of products in
    bfloat16. params: fp32 [R, C] each, all of one shape, with a gradient each or none.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See `torch.optim.Muon.step`."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step(parameters, group)

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        foreach: Any = torch  # whose functions over many tensors have no public names
        gradients = [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
        momenta = [self.state[p][MOMENTUM] for p in parameters]
        foreach._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        lr, count = group["lr"], max(1, _ELEMENTS // parameters[0].numel())
        foreach._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        step = -_adjust_lr(lr, group["adjust_lr_fn"], parameters[0].shape)
        for start in range(0, len(parameters), count):
            part = slice(start, start + count)
            updates = momenta[part]
            if group["nesterov"]:
                updates = foreach._foreach_lerp(gradients[part], momenta[part], group["momentum"])
            whole = torch.stack([*updates]).bfloat16()
            settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
            directions = torch.vmap(_zeropower_via_newtonschulz, in_dims=(0, None, None, None))(
                whole, *settings
            )
            foreach._foreach_add_(
                parameters[part], [*directions.to(torch.float32).unbind()], alpha=step
            )
