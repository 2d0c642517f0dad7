"""QaRL: reinforcement learning where sampler and learner share one low-bit tensor.

    policy = qarl.align("tiny-qwen3", "w4a16")      a transformers model whose forward multiplies
    low-bit tensors engine = qarl.engine(policy)                    vLLM, sampling from the same
    tensors policy.refresh(); policy.publish(engine)        after every step of an optimizer

docs/reference/api.md has every name. Each is imported at its first use: `import qarl` alone costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qarl import losses
    from qarl.api.align import align
    from qarl.api.engine import Engine, engine
    from qarl.api.policy import Policy
    from qarl.api.runs import config, evaluate, plan, train
    from qarl.configs.errors import PolicyError, QarlError
    from qarl.configs.schema.task import TaskConfig
    from qarl.configs.seeds import step_seed
    from qarl.learner.batching import Batch, make_batch, mini_batches
    from qarl.rollout.types import Completion, Group, Prompt
    from qarl.tasks import load_task

__all__ = [
    "Batch",
    "Completion",
    "Engine",
    "Group",
    "Policy",
    "PolicyError",
    "Prompt",
    "QarlError",
    "TaskConfig",
    "align",
    "config",
    "engine",
    "evaluate",
    "load_task",
    "losses",
    "make_batch",
    "mini_batches",
    "plan",
    "step_seed",
    "train",
]

_HOMES = {
    "api.align": "align",
    "api.engine": "Engine engine",
    "api.policy": "Policy",
    "api.runs": "config evaluate plan train",
    "configs.errors": "PolicyError QarlError",
    "configs.schema.task": "TaskConfig",
    "configs.seeds": "step_seed",
    "learner.batching": "Batch make_batch mini_batches",
    "rollout.types": "Completion Group Prompt",
    "tasks": "load_task",
}
"""Modules → the public names that are made there."""


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("qarl.losses")
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"qarl.{module}"), name)
    raise AttributeError(f"module 'qarl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
