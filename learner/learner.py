"""One batch of groups → stepped masters: old log-probs, mini-batches, straight-through gradients, optimizer.

Axes: B sequences, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from learner.batching import Batch, micro_batches, mini_batches
from learner.load_balance import load_balance_coefficient, load_balance_loss
from learner.logprobs import token_logprobs
from learner.mismatch import Mismatch, measure_mismatch
from learner.objectives import OBJECTIVES, ObjectiveInput
from learner.optim import MasterOptimizer
from learner.precision import LossScale
from qarl.config import LearnerConfig
from quant.model import LowBitModel


@dataclass(frozen=True)
class LearnStats:
    """loss, grad_norm, clipped (share of tokens whose gradient was cut), update_log_ratio (mean |log r| at the last
    mini-batch), entropy (nats a token) and load_balance (auxiliary loss of the routers, 0 without) are means over the
    batch's updates. updates, skipped: optimizer steps
    taken, and left out because gradients were not finite. loss_scale: after the batch."""

    mismatch: Mismatch
    loss: float
    grad_norm: float
    clipped: float
    update_log_ratio: float
    entropy: float
    load_balance: float
    updates: int
    skipped: int
    loss_scale: float


class Learner:
    """Owns the policy's masters and their optimizer."""

    def __init__(self, model: LowBitModel, config: LearnerConfig):
        self.model = model
        self.config = config
        self.optimizer = MasterOptimizer(model.masters, model.matrices(), config.optimizer)
        self.loss_scale = LossScale(model.dtype == torch.float16, config.loss_scale, config.loss_scale_growth)
        self._balance = load_balance_coefficient(model, config.router_aux_loss)
        model.records_router_logits = self._balance > 0
        self._objective = OBJECTIVES[config.objective.name]

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """The present policy's log-probs of a batch's responses, fp32 [B, T-1], and its mean entropy in nats."""
        logprobs = torch.zeros_like(batch.sampler_logprobs)
        entropy = 0.0
        for index in micro_batches(batch, torch.arange(len(batch.tokens)), self.config.micro_batch_tokens):
            rows = batch.rows(index).to(self.model.device)
            values, entropies = token_logprobs(self.model, rows.tokens, rows.response, rows.experts)
            logprobs[index, : values.shape[1]] = values.cpu()
            entropy += float(entropies.sum())
        return logprobs, entropy / int(batch.response.sum())

    def learn(
        self, batch: Batch, seed: int, gate: Callable[[Mismatch], None] | None = None, lr_factor: float = 1.0
    ) -> LearnStats:
        """Step over the batch in shuffled mini-batches (by `seed`), materializing a weight version after each.

        gate: called with the batch's mismatch before anything is updated; it may raise. lr_factor: of the learning
        rate, see `learner.optim.lr_factor`. A mini-batch with a non-finite gradient is skipped and counted; masters
        then stay as they were.
        """
        old, entropy = self.logprobs(batch)
        mismatch = measure_mismatch(old, batch.sampler_logprobs, batch.response)
        if gate is not None:
            gate(mismatch)
        taught = [i for i in mini_batches(batch, self.config.mini_batches, seed) if batch.advantages[i].any()]
        updates = [self._update(batch, old, index, lr_factor) for index in taught]
        done = [u for u in updates if u.applied]

        def mean(name: str) -> float:
            return sum(getattr(u, name) for u in updates) / len(updates) if updates else 0.0

        return LearnStats(
            mismatch,
            mean("loss"),
            mean("grad_norm"),
            mean("clipped"),
            updates[-1].log_ratio if updates else 0.0,
            entropy,
            mean("balance"),
            len(done),
            len(updates) - len(done),
            self.loss_scale.scale,
        )

    def _update(self, batch: Batch, old: torch.Tensor, index: torch.Tensor, lr_factor: float) -> "_Update":
        self.optimizer.zero_grad()
        loss = clipped = log_ratio = balance = 0.0
        for micro in micro_batches(batch, index, self.config.micro_batch_tokens):
            rows = batch.rows(micro)
            current, _ = token_logprobs(self.model, rows.tokens, rows.response, rows.experts)
            given = ObjectiveInput(
                current,
                old[micro][:, : current.shape[1]],
                rows.sampler_logprobs,
                rows.response,
                rows.advantages,
            )
            result = self._objective(given, self.config.objective)
            share = result.loss.sum() / len(index)
            if self.model.records_router_logits:
                balance_loss = load_balance_loss(self.model, rows.real().flatten())
                share = share + self._balance * balance_loss * len(micro) / len(index)
                balance += float(balance_loss.detach()) * len(micro) / len(index)
            (share * self.loss_scale.scale).backward()
            loss += float(share.detach())
            clipped += float(result.clipped.sum()) / len(index)
            log_ratio += float(result.log_ratio.abs().sum()) / len(index)
        norm, applied = self._apply(lr_factor)
        return _Update(loss, norm, clipped, log_ratio, balance, applied)

    def _apply(self, lr_factor: float) -> tuple[float, bool]:
        """Unscale, clip, step, refresh. Returns the gradient norm before clipping and whether a step was taken."""
        norm = self.optimizer.gradient_norm() / self.loss_scale.scale
        finite = math.isfinite(norm)
        if finite:
            clip = min(1.0, self.config.optimizer.grad_clip / (norm + 1e-6))
            self.optimizer.scale_gradients(clip / self.loss_scale.scale)
            self.optimizer.step(lr_factor)
            self.model.refresh()
        self.loss_scale.update(finite)
        self.optimizer.zero_grad()
        return (norm if finite else 0.0), finite

    def state_dict(self) -> dict[str, Any]:
        """Masters, optimizer and loss scale."""
        masters = {name: p.detach() for name, p in self.model.masters.items()}
        return {
            "masters": masters,
            "optimizer": self.optimizer.state_dict(),
            "scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict` and materialize it."""
        with torch.no_grad():
            for name, master in self.model.masters.items():
                master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss_scale.load_state_dict(state["scale"])
        self.model.refresh()


@dataclass(frozen=True)
class _Update:
    loss: float
    grad_norm: float
    clipped: float
    log_ratio: float
    balance: float
    applied: bool
