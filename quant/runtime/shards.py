"""Masters of which each process has some rows, and what is whole in all of them.

Scales are of rows, or of groups and blocks within rows, so a process quantizes the rows that it steps; what the
processes exchange then is codes. The rows of an expert stack are its experts. Parameters without a shard pass through
all of this untouched.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Shard:
    """Which rows each process has. shape: of the whole tensor. rank: this process's. edges: where the rows of each
    process begin, by rank, and where the last one's end."""

    shape: torch.Size
    rank: int
    edges: tuple[int, ...]

    def rows(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """A view of a process's part, this one's by default, of a tensor that holds as much for every row: codes,
        scales of rows or of blocks of them, matrices end to end."""
        rank = self.rank if rank is None else rank
        start, stop = (edge * whole.shape[0] // self.shape[0] for edge in self.edges[rank : rank + 2])
        return whole[start:stop]

    def gather(self, whole: torch.Tensor) -> torch.Tensor:
        """Fill in the others' parts of a contiguous tensor whose own part is written; returns it. All processes come
        here together."""
        parts = ((rank, self.rows(whole, rank)) for rank in range(len(self.edges) - 1))
        # As bytes, which every backend sends; gloo knows no float8.
        work = [dist.broadcast(p.view(torch.uint8), rank, async_op=True) for rank, p in parts if p.numel()]
        _wait(work)
        return whole

    def reduce(self, whole: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The sum over all processes of this process's part, a view of `whole`, whose other parts are void then. All
        processes come here together.

        whole: fp32. dtype: in which parts are sent; each is rounded to it once, sums are fp32 (a collective reduction
        would add up in it).
        """
        if dtype != whole.dtype:
            return self._sum_of_rounded(whole, dtype)
        parts = ((rank, self.rows(whole, rank)) for rank in range(len(self.edges) - 1))
        work = [dist.reduce(p, rank, async_op=True) for rank, p in parts if p.numel()]
        _wait(work)
        return self.rows(whole)

    def _sum_of_rounded(self, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        world, mine, rounded = len(self.edges) - 1, self.rows(whole), whole.to(dtype)
        theirs = torch.empty((world, *mine.shape), dtype=dtype, device=whole.device)
        sizes = [self.rows(rounded, rank).nbytes for rank in range(world)]
        sent, room = (tensor.flatten().view(torch.uint8) for tensor in (rounded, theirs))
        dist.all_to_all_single(room, sent, [sizes[self.rank]] * world, sizes)
        for rank, part in enumerate(theirs):
            if rank != self.rank:
                mine += part
        return mine


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """The parameter's shard; None where it is whole."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, whatever this process has of it."""
    shard = shard_of(parameter)
    return parameter.shape if shard is None else shard.shape


@torch.no_grad()
def fill(whole: torch.Tensor, rows: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Write every process's rows into a tensor of the whole shape, cast to its dtype; returns it. All processes come
    here together."""
    if shard is None:
        return whole.copy_(rows)
    shard.rows(whole).copy_(rows)
    return shard.gather(whole)


def whole_value(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of the whole parameter, in `dtype` if given. All processes come here together."""
    room = torch.empty(whole_shape(parameter), dtype=dtype or parameter.dtype, device=parameter.device)
    return fill(room, parameter.detach(), shard_of(parameter))


def cut_rows(shape: torch.Size, rank: int, world: int, unit: int, turn: int) -> Shard:
    """The shard of a tensor of that shape. Matrices and stacks are cut evenly, at multiples of `unit` rows where they
    are matrices; vectors, which are small, are wholly one process's, `turn` saying whose."""
    if len(shape) < 2:
        owner = turn % world
        return Shard(shape, rank, tuple(0 if r <= owner else shape[0] for r in range(world + 1)))
    unit = unit if len(shape) == 2 else 1
    units = -(-shape[0] // unit)
    return Shard(shape, rank, tuple(min(shape[0], unit * (units * r // world)) for r in range(world + 1)))


def shard_parameters(model: nn.Module, rank: int, world: int, unit: int = 1, dtype: torch.dtype | None = None) -> None:
    """Leave this process its rows of every parameter, one that DeepSpeed has partitioned while it was loaded included.

    unit: rows that stay together, the height of a scheme's blocks. dtype: to cast to; DeepSpeed loads in fp32 alone.
    """
    cut = {id(p): _cut(p, rank, world, unit, turn, dtype) for turn, p in enumerate(model.parameters())}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = cut[id(parameter)]


@torch.no_grad()
def _cut(
    parameter: nn.Parameter, rank: int, world: int, unit: int, turn: int, dtype: torch.dtype | None
) -> nn.Parameter:
    shard = cut_rows(getattr(parameter, "ds_shape", parameter.shape), rank, world, unit, turn)
    if hasattr(parameter, "ds_id"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            mine = shard.rows(parameter.detach()).to(dtype, copy=True)
    else:
        mine = shard.rows(parameter.detach()).to(dtype, copy=True)
    kept = nn.Parameter(mine, requires_grad=parameter.requires_grad)
    kept.shard = shard  # type: ignore[attr-defined]
    return kept


def _wait(work: Iterable[dist.Work | None]) -> None:
    for one in work:
        if one is not None:
            one.wait()
