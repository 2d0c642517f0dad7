"""Thread pool for loops that release the interpreter lock: compiled kernels and hashes.

It has as many threads as torch computes with (`torch.set_num_threads`). There is one pool per
process; a forked child makes its own.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_RANGES_A_THREAD = 4
"""Ranges per thread, so that threads on busy cores can take fewer of them."""


def in_threads(
    work: Callable[[int, int], T],
    count: int,
    at_least: int,
) -> list[T]:
    """Return [work(start, stop), …] over contiguous ranges that cover 0 … count-1, in order.

    Raises the first exception of a call.

    Args:
        work: function of the range's start and stop.
        count: number of items.
        at_least: fewest items of a range; with fewer, a thread costs more than it saves.
    """
    threads = torch.get_num_threads()
    ranges = min(_RANGES_A_THREAD * threads, count // max(1, at_least))
    if threads == 1 or ranges <= 1:
        return [work(0, count)]
    edges = [count * i // ranges for i in range(ranges + 1)]
    return list(_pool(threads).map(work, edges[:-1], edges[1:]))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return this process's pool of that many threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="qarl")


# A forked child inherits the pool object but not its threads.
os.register_at_fork(after_in_child=_pool.cache_clear)
