"""One process of several, without the others: torch's backend that sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def one_of_several(rank: int, world: int) -> Iterator[None]:
    """Be process `rank` of `world` within this context. What a collective call returns is void."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which keeps the mesh, and with it the rank
