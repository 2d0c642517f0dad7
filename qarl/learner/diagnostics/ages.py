"""The mismatch of learner and sampler by age of the token.

Age is the number of updates by which the weights that sampled a token are behind the weights that
learn it. The k-th update of a batch, counted from 0, learns tokens of age k. Each weight version
published since they were sampled (`rollout.max_staleness`) adds `learner.mini_batches` to that. At
age 0 sampler and learner have the same weights, so the difference is due to precision and kernels;
any increase with age is staleness.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1; k numbers of versions.
"""

from dataclasses import dataclass
from typing import Any

import torch

from qarl.learner.diagnostics.base import Learning, MicroBatch, Observer
from qarl.learner.diagnostics.figure import Figure


@dataclass(frozen=True)
class MismatchByAge:
    """Mean mismatch for each age: lists of equal length, in order of age."""

    age: tuple[int, ...] = ()
    """Age of the tokens, in updates."""
    mean_abs: tuple[float, ...] = ()
    """Mean |log π_learner - log π_sampler| over the response tokens of that age, at the weights
    that their update moves, nats.
    """
    tokens: tuple[int, ...] = ()
    """Number of response tokens of that age."""


class MismatchByAgeMeter(Observer):
    """Observer that sums |log π_learner - log π_sampler| by age, one update after another."""

    figures = (
        Figure(
            id="by-age",
            title="Mismatch by age",
            unit="nats",
            axis="updates since the weights that sampled",
            help=(
                "Mean |log π_learner − log π_sampler| of all tokens at the weights that their"
                " update moves, over steps; bands reach from the lowest to the highest. At 0 it is"
                " precision and kernels, what it grows by is staleness."
            ),
            lines={"mean": "learn/ages/mean_abs"},
            places="learn/ages/age",
        ),
    )

    def __init__(self, learning: Learning):
        super().__init__(learning)
        batch = learning.batch
        mask = batch.response_mask
        behind = batch.versions_behind
        if behind is None:
            versions = torch.zeros(1, dtype=torch.int64)
            tokens = mask.sum(-1, keepdim=True)
        else:
            versions = behind[mask].unique()
            tokens = torch.stack([((behind == k) & mask).sum(-1) for k in versions], dim=-1)
        self._behind = versions
        """Distinct numbers of versions behind, int64 [k]."""
        self._tokens = tokens
        """Number of each sequence's response tokens that are that many versions behind, int64
        [B, k].
        """
        self._update = torch.full_like(batch.length, -1)
        """Update that learns each sequence, int64 [B]; -1: none so far."""
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Rows [n] of each micro-batch, and their sums [n, k] on the model's device."""

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """Record the update of the rows."""
        self._update[index] = update

    def micro_batch(self, micro: MicroBatch) -> None:
        """Compute this process's sums, without waiting for the device."""
        rows = micro.rows
        distance = (micro.current.detach() - rows.sampler_logprobs).abs() * rows.response_mask
        behind = rows.versions_behind
        sums = [
            (distance if behind is None else distance * (behind == k)).sum(-1)
            for k in self._behind.tolist()
        ]
        self._sums.append((micro.index, torch.stack(sums, dim=-1)))

    def record(self) -> dict[str, Any]:
        """Return `ages`, and log the age of each sequence's oldest token."""
        if self.learning.log is not None:
            self.learning.log.age = self._ages().amax(-1)
        return {"ages": self._mismatch()}

    def _mismatch(self) -> MismatchByAge:
        """Return the mismatch by age over the rows of all processes."""
        sums = torch.zeros(self._tokens.shape, dtype=torch.float64)
        if self._sums:
            index = torch.cat([rows for rows, _ in self._sums])
            own = torch.cat([part for _, part in self._sums])
            sums[index] = own.double().cpu()
        sums = self.learning.processes.all_reduce(sums)
        ages = self._ages()
        distinct = [age for age in ages.unique().tolist() if age >= 0]
        tokens = [int(self._tokens[ages == age].sum()) for age in distinct]
        totals = [float(sums[ages == age].sum()) for age in distinct]
        means = [total / count for total, count in zip(totals, tokens, strict=True)]
        return MismatchByAge(age=tuple(distinct), mean_abs=tuple(means), tokens=tuple(tokens))

    def _ages(self) -> torch.Tensor:
        """Return the age of a sequence's tokens that are so many versions behind, int64 [B, k].

        It is -1 if the sequence has no such tokens, or was in no update.
        """
        update = self._update[:, None]
        ages = update + self._behind * self.learning.config.mini_batches
        return torch.where((self._tokens > 0) & (update >= 0), ages, -1)
