"""Work in threads, for loops that let go of the interpreter: compiled kernels and hashes.

As many as torch computes with (`torch.set_num_threads`). One pool a process, made anew in a forked
child.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_RANGES_A_THREAD = 4
"""So that threads whose core other processes use leave more to the others."""


def in_threads(work: Callable[[int, int], T], count: int, at_least: int) -> list[T]:
    """[work(start, stop), ...] over contiguous ranges that cover 0 … count-1, in order.

    at_least: items of a range below which a thread costs more than it saves. The first exception is
    raised.
    """
    threads = torch.get_num_threads()
    ranges = min(_RANGES_A_THREAD * threads, count // max(1, at_least))
    if threads == 1 or ranges <= 1:
        return [work(0, count)]
    edges = [count * i // ranges for i in range(ranges + 1)]
    return list(_pool(threads).map(work, edges[:-1], edges[1:]))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="qarl")


os.register_at_fork(after_in_child=_pool.cache_clear)
