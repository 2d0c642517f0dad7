"""How gradients of the masters become a step: alone, or over several processes, with DeepSpeed's ZeRO or by rows.

A backend runs the model's forward, the backward of a loss share, and the step; objectives, log-probs and micro-batches
know nothing of it.
"""

from typing import Any, Protocol

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.backends.zero_config import deepspeed_config
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
        masters; ZeRO 1-3 step fp32 masters by themselves."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """masters and optimizer, by name; each name in one process alone. The same whatever the backend and the number
        of processes."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the `state_dict`s of all processes, put together."""
        ...


def check_backend(config: LearnerConfig, processes: int) -> None:
    """Raise `ConfigError` for settings that this number of processes, or DeepSpeed, cannot honour."""
    if config.zero_stage is not None or processes > 1:
        deepspeed_config(config)
    elif config.deepspeed is not None:
        raise ConfigError(
            f"learner.deepspeed is {config.deepspeed!r}, but one process without learner.zero_stage does not use "
            "DeepSpeed; set learner.zero_stage to 0, 1, 2 or 3, or leave learner.deepspeed out"
        )


def make_backend(model: LowBitModel, config: LearnerConfig, processes: Processes) -> Backend:
    """The backend that `learner.zero_stage` asks for. Raises `ConfigError` for settings it cannot honour."""
    from qarl.learner.backends.single import SingleProcess

    check_backend(config, processes.world)
    if config.zero_stage is None and processes.world == 1:
        return SingleProcess(model, config)
    if config.zero_stage == 3:
        from qarl.learner.backends.sharded import Sharded

        return Sharded(model, config, processes)
    from qarl.learner.backends.zero import Zero

    return Zero(model, config, processes)
