"""Optimizers over the masters: AdamW, or Muon for the matrices of linear layers and AdamW for the rest."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from qarl.config import OptimizerConfig

Index = tuple[int | slice, ...]


class MasterOptimizer:
    """One optimizer step over all masters. State is that of the torch optimizers inside."""

    def __init__(self, masters: dict[str, nn.Parameter], matrices: set[str], config: OptimizerConfig):
        """masters: name → parameter. matrices: names of the weights that Muon may take, [O, I] or stacked experts."""
        self._config = config
        by_muon = {n: p for n, p in masters.items() if config.name == "muon" and n in matrices and p.ndim > 1}
        rest = [p for n, p in masters.items() if n not in by_muon]
        decay, lr = config.weight_decay, config.lr
        self._optimizers: list[torch.optim.Optimizer] = []
        self._views = [MatrixView(p, index) for n, p in by_muon.items() for index in matrices_of(n, p)]
        if by_muon:
            muon = torch.optim.Muon(
                [v.parameter for v in self._views],
                lr=lr,
                weight_decay=decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
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
        for view in self._views:
            view.take_gradient()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._config.lr * lr_factor
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in [*self._masters, *(view.parameter for view in self._views)]:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"optimizers": [o.state_dict() for o in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict` of the same masters."""
        for optimizer, inner in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(inner)


class MatrixView:
    """One matrix inside a master, as the 2-D leaf parameter torch's Muon wants; `parameter` shares the storage."""

    def __init__(self, master: nn.Parameter, index: Index):
        self._master = master
        self._index = index
        self.parameter = nn.Parameter(master.detach()[index])

    def take_gradient(self) -> None:
        """Point at the master's present gradient."""
        grad = self._master.grad
        self.parameter.grad = None if grad is None else grad[self._index]


def matrices_of(name: str, master: nn.Parameter) -> Iterator[Index]:
    """Where the matrices of a master are: the whole of it, or each expert's; gate and up count as two."""
    if master.ndim == 2:
        yield (slice(None),)
        return
    rows = master.shape[1] // 2 if name.endswith("gate_up_proj") else master.shape[1]
    for expert in range(master.shape[0]):
        yield from ((expert, slice(start, start + rows)) for start in range(0, master.shape[1], rows))


def lr_factor(step: int, steps: int, warmup: int, decay: int) -> float:
    """The share of the learning rate used in training step `step` (from 0) of `steps`: linear from 1/warmup up to 1
    over the first `warmup` steps, linear down to 1/decay over the last `decay`."""
    return min(1.0, (step + 1) / max(warmup, 1), (steps - step) / max(decay, 1))
