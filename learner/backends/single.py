"""One process: the backward adds to the masters' gradients in place, and `MasterOptimizer` steps them."""

from typing import Any

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.optim.optimizer import MasterOptimizer, Step
from qarl.quant.model.low_bit_model import LowBitModel


class SingleProcess:
    """See `learner.backends.Backend`."""

    def __init__(self, model: LowBitModel, config: LearnerConfig):
        self.policy = model
        model.gradients.configure(in_place=True)
        self.optimizer = MasterOptimizer(model.masters, model.matrices(), config.optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend.backward`."""
        loss.backward()

    def set_learning_rate(self, lr: float) -> None:
        """See `Backend.set_learning_rate`."""
        self.optimizer.lr = lr

    def step(self, diagnose: bool = False) -> Step:
        """See `Backend.step`."""
        done = self.optimizer.clipped_step(diagnose)
        self.optimizer.zero_grad()
        return done

    def state_dict(self) -> dict[str, Any]:
        """See `Backend.state_dict`."""
        masters = {name: p.detach() for name, p in self.policy.masters.items()}
        return {"masters": masters, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Backend.load_state_dict`."""
        with torch.no_grad():
            for name, master in self.policy.masters.items():
                master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
