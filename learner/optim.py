"""Optimizers over the masters: AdamW, or Muon for the matrices of linear layers and AdamW for the rest."""

from typing import Any

import torch
from torch import nn

from qarl.config import OptimizerConfig


class MasterOptimizer:
    """One optimizer step over all masters. State is that of the torch optimizers inside."""

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

    def gradient_norm(self) -> float:
        """Global L2 norm of all gradients, computed in fp32; infinite or NaN where any is."""
        gradients = [p.grad.float() for p in self._masters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient in place."""
        for p in self._masters:
            if p.grad is not None:
                p.grad.mul_(factor)

    def step(self, lr_factor: float = 1.0) -> None:
        """Step every optimizer at `lr_factor` times the configured learning rate."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._config.lr * lr_factor
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self._masters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"optimizers": [o.state_dict() for o in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict` of the same masters."""
        for optimizer, inner in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(inner)


def lr_factor(step: int, steps: int, warmup: int, decay: int) -> float:
    """The share of the learning rate used in training step `step` (from 0) of `steps`: linear from 1/warmup up to 1
    over the first `warmup` steps, linear down to 1/decay over the last `decay`."""
    return min(1.0, (step + 1) / max(warmup, 1), (steps - step) / max(decay, 1))
