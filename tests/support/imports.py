"""Everything commands import, at once, and out of the way of garbage collection."""

import contextlib
import functools
import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.cases import cases

ELSEWHERE = "qarl.integrations."
"""What needs other trainers' libraries, which few have."""
LIBRARIES = cases(__file__, "libraries")


@functools.cache
def import_libraries() -> None:
    """Import what an engine is made of, and take all that lives now out of garbage collection, for
    good. Engines of this process and its forks have small caches.

    vLLM collects nine times an engine, and each time would walk the millions of objects that
    modules are made of: 3 s a start. It also freezes and unfreezes on its own, which would undo
    this, so both do nothing from here on.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    from numba.core.registry import cpu_target
    from vllm.model_executor.layers.quantization import get_quantization_config

    target: Any = cpu_target
    target.typing_context.refresh()  # as the first call of a compiled loop does
    target.target_context.refresh()
    get_quantization_config("fp8")  # of any name: it imports all
    _shrink_caches()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _shrink_caches() -> None:
    """On CPUs an engine's key/value cache is an eighth of what it is given: 0.4 s less of writing
    zeros an engine, for models whose whole batch takes 10 MB of a GiB.
    """
    import torch

    from qarl.rollout.vllm import engine

    arguments = engine.llm_arguments

    def with_small_cache(options: Any) -> dict[str, Any]:
        found = arguments(options)
        share = 1 if torch.cuda.is_available() else 8
        return {
            **found,
            "kv_cache_memory_bytes": found["kv_cache_memory_bytes"] // share,
        }

    engine.llm_arguments = with_small_cache


def import_everything() -> None:
    """What any command needs; settings that libraries read at import are those of `qarl` first.
    Begins no thread.
    """
    from qarl.cli.environment import quiet_libraries

    quiet_libraries()
    from qarl.rollout.vllm.options import prepare_environment

    prepare_environment()
    with no_threads():
        for module in pkgutil.walk_packages(["qarl"], "qarl."):
            if not module.name.endswith("__main__") and not module.name.startswith(ELSEWHERE):
                importlib.import_module(module.name)
        import_libraries()


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Assert that none begins within: a fork would have its locks alone. Forks make pyarrow's
    jemalloc's anew.
    """
    tasks = Path("/proc/self/task")
    before = set(os.listdir(tasks))
    yield
    begun = [
        (tasks / task / "comm").read_text().strip() for task in set(os.listdir(tasks)) - before
    ]
    assert set(begun) <= {"jemalloc_bg_thd"}, (
        f"threads {begun} began: forks would have locks that nobody opens"
    )
