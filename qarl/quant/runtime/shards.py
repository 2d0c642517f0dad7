"""Masters of which each process has some rows, and what is whole in all of them.

Scales are of rows, or of groups and blocks within rows, so a process quantizes the rows that it
steps; what the processes exchange then is codes. The rows of an expert stack are its experts.
Parameters without a shard pass through all of this untouched.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13's name, and the one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shard:
    """Which rows each process has. shape: of the whole tensor. rank: this process's. edges: where
    the rows of each process begin, by rank, and where the last one's end.
    """

    shape: torch.Size
    rank: int
    edges: tuple[int, ...]

    def rows(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """A view of a process's part, this one's by default, of a tensor that holds as much for
        every row: codes, scales of rows or of blocks of them, matrices end to end.
        """
        rank = self.rank if rank is None else rank
        start, stop = (
            edge * whole.shape[0] // self.shape[0] for edge in self.edges[rank : rank + 2]
        )
        return whole[start:stop]

    @property
    def even(self) -> bool:
        """Whether all processes have equally many rows."""
        return len({stop - start for start, stop in itertools.pairwise(self.edges)}) == 1

    def gather(self, whole: Tensor) -> Tensor:
        """Fill in the others' parts of a contiguous tensor whose own part is written; returns it. A
        collective call.
        """
        # which every backend sends; gloo knows no float8
        sent = whole.view(torch.uint8)
        world = len(self.edges) - 1
        if self.even and len(whole) % world == 0:
            work = [_all_gather(sent, self.rows(sent), async_op=True)]
        else:
            parts = ((rank, self.rows(sent, rank)) for rank in range(world))
            work = [
                dist.broadcast(part, rank, async_op=True) for rank, part in parts if part.numel()
            ]
        _wait(work)
        return whole

    def reduce(
        self,
        whole: Tensor,
        dtype: torch.dtype = torch.float32,
        scatters: bool | None = None,
    ) -> Callable[[], Tensor]:
        """Begin to add up this process's part over all processes; what is returned waits for the
        sum and returns it, a view of `whole`, whose other parts are void from here on. All
        processes come here together.

        whole: fp32. dtype: in which parts are sent; each is rounded to it once, sums are fp32 (a
        collective reduction would add up in it). scatters: by reduce-scatter, of an even shard in
        fp32; None: where it can be, on GPUs, for gloo's sends twice as much.
        """
        mine, others, world = self.rows(whole), (), len(self.edges) - 1
        if whole.is_cuda and self.even and dtype == whole.dtype if scatters is None else scatters:
            work = _reduce_scatter(mine, whole, async_op=True)
        else:
            rounded = whole.to(dtype)
            others = torch.empty((world, *mine.shape), dtype=dtype, device=whole.device)
            sizes = [self.rows(rounded, rank).nbytes for rank in range(world)]
            sent, room = (tensor.flatten().view(torch.uint8) for tensor in (rounded, others))
            work = dist.all_to_all_single(
                room, sent, [sizes[self.rank]] * world, sizes, async_op=True
            )

        def total() -> Tensor:
            _wait([work])
            for rank, part in enumerate(others):
                if rank != self.rank:
                    mine.add_(part)
            return mine

        return total


def shard_of(parameter: Tensor) -> Shard | None:
    """The parameter's shard; None where it is whole."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, whatever this process has of it."""
    shard = shard_of(parameter)
    return parameter.shape if shard is None else shard.shape


@torch.no_grad()
def fill(whole: Tensor, rows: Tensor, shard: Shard | None) -> Tensor:
    """Write every process's rows into a tensor of the whole shape, cast to its dtype; returns it. A
    collective call.
    """
    if shard is None:
        return whole.copy_(rows)
    shard.rows(whole).copy_(rows)
    return shard.gather(whole)


def whole_value(
    parameter: Tensor, dtype: torch.dtype | None = None, rows: Tensor | None = None
) -> Tensor:
    """A copy of the whole parameter, in `dtype` if given. rows: values to take for this process's
    part of it, instead of its own. All processes come here together.
    """
    rows = parameter.detach() if rows is None else rows
    room = torch.empty(whole_shape(parameter), dtype=dtype or parameter.dtype, device=rows.device)
    return fill(room, rows, shard_of(parameter))


class Share(NamedTuple):
    """Which process of how many. unit: rows that stay together, the height of a scheme's blocks."""

    rank: int
    world: int
    unit: int = 1


def cut_rows(shape: torch.Size, rank: int, world: int, unit: int, turn: int) -> Shard:
    """The shard of a tensor of that shape. Matrices and stacks are cut evenly, at multiples of
    `unit` rows where they are matrices; vectors, which are small, are wholly one process's, `turn`
    saying whose.
    """
    if len(shape) < 2:
        owner = turn % world
        return Shard(shape, rank, tuple(0 if r <= owner else shape[0] for r in range(world + 1)))
    unit = unit if len(shape) == 2 else 1
    units = -(-shape[0] // unit)
    return Shard(
        shape,
        rank,
        tuple(min(shape[0], unit * (units * r // world)) for r in range(world + 1)),
    )


def rows_of(
    parameters: Mapping[str, nn.Parameter], rank: int, world: int
) -> dict[str, nn.Parameter]:
    """A process's rows of whole parameters, in their storage: what is written into either is in
    both.
    """
    shards = {
        name: cut_rows(p.shape, rank, world, 1, turn)
        for turn, (name, p) in enumerate(parameters.items())
    }
    return {
        name: kept(shards[name].rows(p.detach()), shards[name], True)
        for name, p in parameters.items()
    }


def shard_parameters(model: nn.Module, share: Share) -> None:
    """Leave a process its rows of every parameter. Those that have a shard already are left
    alone.
    """
    parts = {
        id(p): cut(p, share, turn) if shard_of(p) is None else p
        for turn, p in enumerate(model.parameters())
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = parts[id(parameter)]


def cut(parameter: nn.Parameter, share: Share, turn: int) -> nn.Parameter:
    """A copy of a process's rows of a whole parameter. turn: see `cut_rows`."""
    shard = cut_rows(parameter.shape, *share, turn)
    return kept(shard.rows(parameter.detach()).clone(), shard, parameter.requires_grad)


def kept(rows: Tensor, shard: Shard, requires_grad: bool) -> nn.Parameter:
    """A parameter of these rows, with their `shard`."""
    parameter = nn.Parameter(rows, requires_grad=requires_grad)
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def _wait(work: Sequence[dist.Work | None]) -> None:
    for one in work:
        if one is not None:
            one.wait()
