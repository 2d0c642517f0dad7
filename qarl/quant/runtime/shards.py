"""Sharding of masters by rows, and the exchange of full tensors between processes.

Each process has some rows of a master. Scales belong to rows, or to groups and blocks within rows,
so a process can quantize the rows that it steps, and the processes exchange codes. The rows of an
expert stack are its experts. Parameters without a shard pass through these functions unchanged.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 has the first name of each, earlier releases have the second.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Shard:
    """Rows of a tensor that each process has."""

    shape: torch.Size
    """Shape of the full tensor."""
    rank: int
    """This process's number."""
    edges: tuple[int, ...]
    """First row of each process, by rank, followed by the number of rows."""

    def rows(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """Return a view of one process's part of a full tensor.

        The first axis may have more or fewer entries than the shard has rows, if every row has the
        same share of them: codes, scales of rows or of blocks of rows, flattened stacks. Default:
        this process's part.
        """
        rank = self.rank if rank is None else rank
        start, stop = (
            edge * whole.shape[0] // self.shape[0] for edge in self.edges[rank : rank + 2]
        )
        return whole[start:stop]

    @property
    def even(self) -> bool:
        """Return whether all processes have equally many rows."""
        sizes = {stop - start for start, stop in itertools.pairwise(self.edges)}
        return len(sizes) == 1

    def gather(self, whole: Tensor) -> Tensor:
        """Fill in the other processes' parts of a contiguous tensor whose own part is written.

        Returns the tensor. A collective call.
        """
        # Every backend sends bytes, while gloo cannot send float8.
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
        """Start to sum this process's part over all processes, and return a function that finishes.

        That function waits for the sum and returns it, a view of `whole`. The other parts of
        `whole` are invalid from now on. A collective call.

        Args:
            whole: full tensor of this process's terms, fp32.
            dtype: dtype in which parts are sent. Each part is rounded to it once, and sums are
                fp32, whereas a collective reduction would sum in `dtype`.
            scatters: use reduce-scatter, which needs an even shard and fp32. Default: use it on
                GPUs if possible, but not on CPUs, because gloo's sends twice as much.
        """
        world = len(self.edges) - 1
        mine = self.rows(whole)
        received = ()
        if scatters is None:
            scatters = whole.is_cuda and self.even and dtype == whole.dtype
        if scatters:
            work = _reduce_scatter(mine, whole, async_op=True)
        else:
            rounded = whole.to(dtype)
            received = torch.empty((world, *mine.shape), dtype=dtype, device=whole.device)
            sizes = [self.rows(rounded, rank).nbytes for rank in range(world)]
            sent_bytes = rounded.flatten().view(torch.uint8)
            received_bytes = received.flatten().view(torch.uint8)
            work = dist.all_to_all_single(
                received_bytes, sent_bytes, [sizes[self.rank]] * world, sizes, async_op=True
            )

        def total() -> Tensor:
            _wait([work])
            for rank, part in enumerate(received):
                # `whole` has this process's own part already, in fp32.
                if rank != self.rank:
                    mine.add_(part)
            return mine

        return total


def shard_of(parameter: Tensor) -> Shard | None:
    """Return the parameter's shard; None if this process has all of it."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the full parameter, of which this process may have a part."""
    shard = shard_of(parameter)
    return parameter.shape if shard is None else shard.shape


@torch.no_grad()
def fill(whole: Tensor, rows: Tensor, shard: Shard | None) -> Tensor:
    """Write every process's rows into a tensor of the full shape, cast to its dtype.

    Returns that tensor. A collective call if there is a shard.
    """
    if shard is None:
        return whole.copy_(rows)
    shard.rows(whole).copy_(rows)
    return shard.gather(whole)


def whole_value(
    parameter: Tensor, dtype: torch.dtype | None = None, rows: Tensor | None = None
) -> Tensor:
    """Return a copy of the full parameter, in `dtype` if given.

    rows: values of this process's part. Default: the parameter's own. A collective call if the
    parameter has a shard.
    """
    rows = parameter.detach() if rows is None else rows
    full = torch.empty(whole_shape(parameter), dtype=dtype or parameter.dtype, device=rows.device)
    return fill(full, rows, shard_of(parameter))


class Share(NamedTuple):
    """This process among those that share the parameters."""

    rank: int
    """Number of this process, from 0."""
    world: int
    """Number of processes."""
    unit: int = 1
    """Rows that must stay in one process: the height of a scheme's blocks."""


def cut_rows(
    shape: torch.Size,
    rank: int,
    world: int,
    unit: int,
    turn: int,
) -> Shard:
    """Return the shard of a tensor of that shape.

    Matrices and stacks are cut evenly, matrices at multiples of `unit` rows. A vector, which is
    small, goes to a single process, number `turn` modulo `world`.
    """
    if len(shape) < 2:
        owner = turn % world
        edges = tuple(0 if r <= owner else shape[0] for r in range(world + 1))
        return Shard(shape, rank, edges)
    unit = unit if len(shape) == 2 else 1
    units = -(-shape[0] // unit)
    edges = tuple(min(shape[0], unit * (units * r // world)) for r in range(world + 1))
    return Shard(shape, rank, edges)


def rows_of(
    parameters: Mapping[str, nn.Parameter], rank: int, world: int
) -> dict[str, nn.Parameter]:
    """Return a process's rows of full parameters, as views of their storage."""
    rows = {}
    for turn, (name, parameter) in enumerate(parameters.items()):
        shard = cut_rows(parameter.shape, rank, world, 1, turn)
        rows[name] = kept(shard.rows(parameter.detach()), shard, True)
    return rows


def shard_parameters(model: nn.Module, share: Share) -> None:
    """Replace every parameter of a model by this process's rows of it.

    Parameters that already have a shard do not change.
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
    """Return a copy of a process's rows of a full parameter. turn: see `cut_rows`."""
    shard = cut_rows(parameter.shape, *share, turn)
    return kept(shard.rows(parameter.detach()).clone(), shard, parameter.requires_grad)


def kept(rows: Tensor, shard: Shard, requires_grad: bool) -> nn.Parameter:
    """Return a parameter of these rows, with their `shard` as an attribute."""
    parameter = nn.Parameter(rows, requires_grad=requires_grad)
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def _wait(work: Sequence[dist.Work | None]) -> None:
    """Wait for collective operations; None is one that has already finished."""
    for one in work:
        if one is not None:
            one.wait()
