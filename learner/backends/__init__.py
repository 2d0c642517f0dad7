"""How gradients of the masters become a step: by QaRL itself, in one process or several, or by DeepSpeed's ZeRO 1 or 2.

A backend runs the model's forward, the backward of a loss share, and the step; objectives, log-probs and micro-batches
know nothing of it.
"""

from typing import Any, Protocol

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.optimizer import Step
from qarl.learner.processes import Processes
from qarl.quant.model.low_bit_model import LowBitModel


class Backend(Protocol):
    """Steps the masters of one model. All processes call every method together, in the same order."""

    @property
    def policy(self) -> Any:
        """What forwards with gradient go through; called like the `LowBitModel`."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss share (0-d, with gradient) to the mini-batch's: the sum over micro-batches and
        over processes."""
        ...

    def set_learning_rate(self, lr: float) -> None:
        """Of the steps to come."""
        ...

    def step(self, diagnose: bool = False) -> Step:
        """Clip and step, then drop the gradients. diagnose: count lost updates, where `MasterOptimizer` steps the
        masters; ZeRO 1 and 2 step fp32 masters by themselves."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """masters and optimizer, by name; each name in one process alone. The same whatever the backend and the number
        of processes."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the `state_dict`s of all processes, put together."""
        ...


def make_backend(model: LowBitModel, config: LearnerConfig, processes: Processes) -> Backend:
    """The backend that `learner.zero_stage` asks for."""
    if config.zero_stage not in (1, 2):
        from qarl.learner.backends.native import Native

        return Native(model, config, processes)
    from qarl.learner.backends.zero import Zero

    return Zero(model, config, processes)
