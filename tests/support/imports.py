"""Everything commands import, at once, and out of the way of garbage collection."""

import functools
import gc
import importlib
import pkgutil

ROOMS = ("configs", "quant", "rollout", "learner", "sync", "qarl")
ELSEWHERE = ("qarl.bench.learner.trl_worker", "qarl.doctor.triton_add", "quant.kernels.triton_wna16")
"""TRL has an environment of its own; Triton comes with CUDA."""
LIBRARIES = (
    "numba",
    "reasoning_gym",
    "torch.utils.tensorboard",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)


@functools.cache
def import_libraries() -> None:
    """Import what an engine is made of, and take all that lives now out of garbage collection, for good.

    vLLM collects nine times an engine, and each time would walk the millions of objects that modules are made of: 3 s a
    start. It also freezes and unfreezes on its own, which would undo this, so both do nothing from here on.
    """
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def import_everything() -> None:
    """What any command needs; settings that libraries read at import are those of `qarl` first."""
    from qarl.cli.environment import quiet_libraries

    quiet_libraries()
    from rollout.vllm.options import prepare_environment

    prepare_environment()
    for room in ROOMS:
        for module in pkgutil.walk_packages([room], f"{room}."):
            if not module.name.endswith("__main__") and module.name not in ELSEWHERE:
                importlib.import_module(module.name)
    import_libraries()
