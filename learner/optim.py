"""Optimizers over the masters: AdamW, or Muon for the matrices of linear layers and AdamW for the rest."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from qarl.config import OptimizerConfig


class MasterOptimizer:
    """One optimizer step over all masters, with linear warm-up. State is that of the torch optimizers inside."""

    def __init__(self, masters: dict[str, nn.Parameter], matrices: set[str], config: OptimizerConfig):
        """masters: name → parameter. matrices: names of 2-D linear weights that Muon may take."""
        self._config = config
        by_muon = [p for n, p in masters.items() if config.name == "muon" and n in matrices and p.ndim == 2]
        taken = {id(p) for p in by_muon}
        rest = [p for p in masters.values() if id(p) not in taken]
        decay, lr = config.weight_decay, config.lr
        self._optimizers: list[torch.optim.Optimizer] = []
        if by_muon:
            muon = torch.optim.Muon(
                by_muon, lr=lr, weight_decay=decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
            )
            self._optimizers.append(muon)
        if rest:
            self._optimizers.append(torch.optim.AdamW(rest, lr=lr, weight_decay=decay, betas=config.betas))
        self._masters = list(masters.values())
        self.steps = 0

    def gradient_norm(self) -> float:
        """Global L2 norm of all gradients, computed in fp32; infinite or NaN where any is."""
        gradients = [p.grad.float() for p in self._masters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient in place."""
        for p in self._masters:
            if p.grad is not None:
                p.grad.mul_(factor)

    def step(self) -> None:
        """Step every optimizer at the warmed-up learning rate."""
        self.steps += 1
        warm = min(1.0, self.steps / (self._config.warmup_steps + 1)) if self._config.warmup_steps else 1.0
        self._each_group(lambda group: group.update(lr=self._config.lr * warm))
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self._masters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"steps": self.steps, "optimizers": [o.state_dict() for o in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict` of the same masters."""
        self.steps = state["steps"]
        for optimizer, inner in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(inner)

    def _each_group(self, change: Callable[[dict[str, Any]], None]) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                change(group)
