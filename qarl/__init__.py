"""QaRL: reinforcement learning where sampler and learner share one low-bit tensor.

    policy = qarl.align("tiny-qwen3", "w4a16")  # a transformers model that multiplies low-bit codes
    engine = qarl.engine(policy)  # vLLM, which samples from the same codes
    ...  # loss, backward and optimizer step on policy.parameters()
    policy.refresh()  # after every step of an optimizer
    policy.publish(engine)

docs/reference/api.md describes every name. Each is imported at its first use: `import qarl` alone
imports neither torch nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qarl.configs.version import VERSION

if TYPE_CHECKING:  # the names' types for type checkers and editors; `x as x` re-exports
    from qarl import losses as losses
    from qarl import verify as verify
    from qarl.api.align import align as align
    from qarl.api.engine import Engine as Engine
    from qarl.api.engine import engine as engine
    from qarl.api.policy import Policy as Policy
    from qarl.api.runs import config as config
    from qarl.api.runs import evaluate as evaluate
    from qarl.api.runs import plan as plan
    from qarl.api.runs import train as train
    from qarl.configs.errors import PolicyError as PolicyError
    from qarl.configs.errors import QarlError as QarlError
    from qarl.configs.schema.task import TaskConfig as TaskConfig
    from qarl.configs.seeds import step_seed as step_seed
    from qarl.learner.batching import Batch as Batch
    from qarl.learner.batching import make_batch as make_batch
    from qarl.learner.batching import mini_batches as mini_batches
    from qarl.rollout.types import Completion as Completion
    from qarl.rollout.types import Group as Group
    from qarl.rollout.types import Prompt as Prompt
    from qarl.tasks import load_task as load_task

__version__ = VERSION

_MODULE_OF = {
    "Batch": "qarl.learner.batching",
    "Completion": "qarl.rollout.types",
    "Engine": "qarl.api.engine",
    "Group": "qarl.rollout.types",
    "Policy": "qarl.api.policy",
    "PolicyError": "qarl.configs.errors",
    "Prompt": "qarl.rollout.types",
    "QarlError": "qarl.configs.errors",
    "TaskConfig": "qarl.configs.schema.task",
    "align": "qarl.api.align",
    "config": "qarl.api.runs",
    "engine": "qarl.api.engine",
    "evaluate": "qarl.api.runs",
    "load_task": "qarl.tasks",
    "losses": "qarl.losses",
    "make_batch": "qarl.learner.batching",
    "mini_batches": "qarl.learner.batching",
    "plan": "qarl.api.runs",
    "step_seed": "qarl.configs.seeds",
    "train": "qarl.api.runs",
    "verify": "qarl.verify",
}
"""Public names and the modules that define them."""

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'qarl' has no attribute {name!r}")
    module = import_module(_MODULE_OF[name])
    return module if name in ("losses", "verify") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
