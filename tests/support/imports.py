"""Import of everything that commands need, at once and outside of garbage collection."""

import contextlib
import functools
import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INTEGRATIONS = "qarl.integrations."
"""Modules that need other trainers' libraries, which few machines have."""
LIBRARIES = [
    "numba",
    "pandas",
    "pyarrow.parquet",
    "reasoning_gym",
    "torch.utils.tensorboard",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.triton_utils.dispatcher",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
]


@functools.cache
def import_libraries() -> None:
    """Import an engine's libraries and exempt all live objects from garbage collection for good.

    Engines of this process and its forks get small caches.

    vLLM collects nine times per engine, and each collection would walk the millions of objects of
    the modules: 3 s per start. It also freezes and unfreezes on its own, which would undo this, so
    both do nothing afterwards.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    from numba.core.registry import cpu_target
    from vllm.model_executor.layers.quantization import get_quantization_config

    target: Any = cpu_target
    target.typing_context.refresh()  # as the first call of a compiled loop does
    target.target_context.refresh()
    get_quantization_config("fp8")  # of any name: it imports all
    # as the first engine does, 0.5 s in each fork
    from vllm.platforms import current_platform

    from qarl.quant.kernels.vllm_cpu import register_triton_forms_once
    from qarl.quant.runtime.llvmlite_repair import repair

    if current_platform.is_cpu():
        repair()  # registering reads the attributes of all modules
        register_triton_forms_once()
        current_platform.register_triton_kernel_overrides()
    _shrink_caches()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _shrink_caches() -> None:
    """Give CPU engines an eighth of their key/value cache, which saves 0.4 s of writing zeros per
    engine. The whole batch of these models takes 10 MB of a GiB.
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
    """Import what any command needs, starting with `qarl`, whose settings other libraries read at
    import. Starts no thread.
    """
    from qarl.cli.environment import quiet_libraries

    quiet_libraries()
    from qarl.rollout.vllm.options import prepare_environment

    prepare_environment()
    with no_threads():
        for module in pkgutil.walk_packages(["qarl"], "qarl."):
            if not module.name.endswith("__main__") and not module.name.startswith(INTEGRATIONS):
                importlib.import_module(module.name)
        import_libraries()


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Assert that no thread starts within this context, because a fork would inherit only its
    locks. Forks recreate the threads of pyarrow's jemalloc.
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
