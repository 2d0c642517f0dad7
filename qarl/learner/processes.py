"""The learner's processes: one a device, each with its own engine, all with the same weight
version.

A launcher (`qarl train --processes N`, torchrun, deepspeed) sets RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT for each process. In a single process every collective here is the
identity.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from qarl.configs.errors import QarlError
from qarl.quant.runtime.parent import launched, rank, world_size

T = TypeVar("T")
_LONGEST_WAIT = timedelta(hours=12)
"""Timeout of collectives, because another process's rollout may take hours longer. torch's
default is half an hour. If a process dies, its launcher ends those that wait for it.
"""
RENDEZVOUS = "QARL_RENDEZVOUS"
"""Environment variable with the file through which the processes of one machine find each other,
instead of MASTER_PORT.
"""


class FailedElsewhereError(QarlError, heading=""):
    """Raised in the other processes when one process failed; that process reports the cause."""


class LostProcessError(QarlError, heading="another process of this run is gone, and says why"):
    """A collective failed because another process is gone."""


@dataclass(frozen=True)
class Processes:
    """The processes that learn together, as seen by one of them."""

    rank: int = 0
    """Rank of this process, from 0."""
    world: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Rank of this process on its machine, which is also the number of its GPU."""

    @property
    def first(self) -> bool:
        """True if this process prints and writes what all processes have in common."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Device on which this process computes."""
        return (
            torch.device("cuda", self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )

    def span(self, count: int) -> range:
        """Return which of `count` items belong to this process.

        Shares differ by one item at most.
        """
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def share(self, items: list[T]) -> list[T]:
        """Return this process's part of a list that all processes have, in order."""
        span = self.span(len(items))
        return items[span.start : span.stop]

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` (any device) over the processes in place, and return them."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, by rank. Values must be picklable."""
        if self.world == 1:
            return [value]
        results: list[Any] = [None] * self.world
        dist.all_gather_object(results, value)
        return results

    def concatenated(self, items: list[T]) -> list[T]:
        """Return the lists of all processes one after another, the inverse of `share`."""
        return [item for part in self.all_gather(items) for item in part]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return any(self.all_gather(flag))

    def barrier(self) -> None:
        """Return when all processes have called this."""
        self.all_gather(None)

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Call `work` in the first process, and return its picklable result in all.

        If it raises, the other processes raise `FailedElsewhereError`.
        """
        if self.world == 1:
            return work()
        failure: Exception | None = None
        result: Any = None
        if self.first:
            try:
                result = work()
            except Exception as error:
                failure = error
        result, failed = self.all_gather((result, failure is not None))[0]
        if failure is not None:
            raise failure
        if failed:
            raise FailedElsewhereError("the first process failed; it says why")
        return result


def join_processes(alone: bool = False) -> Processes:
    """Open torch's process group, and return the processes as seen by this one.

    They are those that a launcher started. Without a launcher there is one process, and no group.

    alone: without a launcher open a group of one, which DeepSpeed needs.
    """
    if not launched():
        if alone and not dist.is_initialized():
            dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
        return Processes()
    local_rank = int(os.environ.get("LOCAL_RANK", rank()))
    processes = Processes(rank(), world_size(), local_rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        file = os.environ.get(RENDEZVOUS)
        rendezvous: dict[str, Any] = {}
        if file:
            rendezvous = {
                "init_method": f"file://{file}",
                "rank": processes.rank,
                "world_size": processes.world,
            }
        dist.init_process_group(_backend(), timeout=_LONGEST_WAIT, **rendezvous)
    return processes


def _backend() -> str:
    """Return torch's backends for the devices of this machine."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def is_lost_process(error: Exception) -> bool:
    """Return whether a collective failed because another process is gone.

    That process reports the cause.
    """
    if not launched() or not isinstance(error, RuntimeError):
        return False
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(message in str(error) for message in messages)


def leave_processes() -> None:
    """Close torch's process group, if it is open."""
    if dist.is_initialized():
        dist.destroy_process_group()
