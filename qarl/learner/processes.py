"""The learner's processes: one a device, each with its own engine, all with the same weight
version.

A launcher (`qarl train --processes N`, torchrun, deepspeed) tells each its place by RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. In one process everything here is the identity.
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
"""For another process, whose rollout may take hours longer; torch's is half an hour. A launcher
ends those that wait for one that died.
"""
RENDEZVOUS = "QARL_RENDEZVOUS"
"""Environment variable: the file by which processes of one machine find each other, instead of
MASTER_PORT.
"""


class FailedElsewhereError(QarlError, heading=""):
    """Another process failed in what was its to do; there is nothing to add here."""


class LostProcessError(QarlError, heading="another process of this run is gone, and says why"):
    """A collective failed because another process is gone."""


@dataclass(frozen=True)
class Processes:
    """rank: this one's, from 0; world: how many there are. local_rank: on this machine, which is
    also its GPU.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this process is the one that prints and writes what all have in common."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return (
            torch.device("cuda", self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )

    def span(self, count: int) -> range:
        """Which of `count` things are this process's; shares differ by one at most."""
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def share(self, items: list[T]) -> list[T]:
        """This process's part of a list all have, in order."""
        span = self.span(len(items))
        return items[span.start : span.stop]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the processes, into `values` (any device), which is returned."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gathered(self, value: Any) -> list[Any]:
        """Every process's picklable value, by rank."""
        if self.world == 1:
            return [value]
        results: list[Any] = [None] * self.world
        dist.all_gather_object(results, value)
        return results

    def concatenated(self, items: list[T]) -> list[T]:
        """The lists of all processes one after another; the inverse of `share`."""
        return [item for part in self.gathered(items) for item in part]

    def any(self, flag: bool) -> bool:
        """Whether it holds in any process."""
        return any(self.gathered(flag))

    def wait(self) -> None:
        """Return when all processes have come here."""
        self.gathered(None)

    def first_does(self, work: Callable[[], T]) -> T:
        """The first process does it, all return its picklable result; if it raises, others
        `FailedElsewhereError`.
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
        result, failed = self.gathered((result, failure is not None))[0]
        if failure is not None:
            raise failure
        if failed:
            raise FailedElsewhereError("the first process failed; it says why")
        return result


def join_processes(alone: bool = False) -> Processes:
    """This process's place among those a launcher started, with torch's process group open; the
    only one without a launcher. alone: open a group of one then as well, for the collectives of
    ZeRO's stages.
    """
    if not launched():
        if alone and not dist.is_initialized():
            dist.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
        return Processes()
    place = Processes(rank(), world_size(), int(os.environ.get("LOCAL_RANK", rank())))
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
    if not dist.is_initialized():
        file = os.environ.get(RENDEZVOUS)
        met = (
            {
                "init_method": f"file://{file}",
                "rank": place.rank,
                "world_size": place.world,
            }
            if file
            else {}
        )
        dist.init_process_group(_backend(), timeout=_LONGEST_WAIT, **met)
    return place


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def is_lost_process(error: Exception) -> bool:
    """Whether a collective failed because another process is gone; that one says why."""
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return (
        launched()
        and isinstance(error, RuntimeError)
        and any(text in str(error) for text in messages)
    )


def leave_processes() -> None:
    """Close torch's process group, if it is open."""
    if dist.is_initialized():
        dist.destroy_process_group()
