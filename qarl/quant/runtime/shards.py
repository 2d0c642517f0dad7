"""Sharding of masters by rows, and the exchange of full tensors between processes.

A shared master is torch's `DTensor`, divided along its first axis (`Shard(0)`), so its shape is
that of the full tensor. Scales belong to rows, or to groups and blocks within rows, so a process
can quantize the rows that it steps, and the processes exchange codes. The rows of an expert stack
are its experts. Plain parameters pass through these functions unchanged.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as ByRows

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


def mesh_of_all(device: torch.device) -> DeviceMesh:
    """Return the mesh of all processes, by the backend of their device."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard_of(parameter: Tensor) -> Shard | None:
    """Return the parameter's shard; None if this process has all of it."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    return cut_rows(parameter.shape, mesh.get_local_rank(), mesh.size())


def own_rows(tensor: Tensor) -> Tensor:
    """Return this process's rows of a shared tensor, as a view; a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shared_like(rows: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor of these rows that is shared as the parameter is.

    rows: this process's, which are viewed, not copied; on the host, too, if the parameter is on a
    GPU.
    """
    if not isinstance(parameter, DTensor):
        return rows
    mesh = parameter.device_mesh
    if rows.device.type != mesh.device_type:
        mesh = mesh_of_all(rows.device)
    return _shared(rows, mesh, parameter.shape)


def row_a_process(row: Tensor) -> Tensor:
    """Return the shared tensor [processes, …] of which this process has one row."""
    mesh = mesh_of_all(row.device)
    return _shared(row[None], mesh, torch.Size((mesh.size(), *row.shape)))


def cut_rows(shape: torch.Size, rank: int, world: int) -> Shard:
    """Return the shard of a tensor of that shape, which is divided as `torch.chunk` divides it.

    The last processes may have fewer rows, or none.
    """
    height = -(-shape[0] // world)
    edges = tuple(min(shape[0], height * r) for r in range(world + 1))
    return Shard(shape, rank, edges)


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
    parameter is shared.
    """
    rows = own_rows(parameter.detach()) if rows is None else rows
    full = torch.empty(parameter.shape, dtype=dtype or parameter.dtype, device=rows.device)
    return fill(full, rows, shard_of(parameter))


def fp32_value(parameter: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the full parameter in fp32, not copied if it is so already; see `whole_value`."""
    value = parameter.detach() if rows is None else rows
    if shard_of(parameter) is None and value.dtype == torch.float32:
        return value
    return whole_value(parameter, torch.float32, rows)


def share(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a shared parameter with a copy of this process's rows of a full one."""
    full = parameter.detach()
    rows = cut_rows(full.shape, mesh.get_local_rank(), mesh.size()).rows(full).clone()
    return nn.Parameter(_shared(rows, mesh, full.shape), parameter.requires_grad)


def _shared(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """Return the tensor of that shape of which this process has `rows`."""
    placements: list[Placement] = [ByRows(0)]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def _wait(work: Sequence[dist.Work | None]) -> None:
    """Wait for collective operations; None is one that has already finished."""
    for one in work:
        if one is not None:
            one.wait()
