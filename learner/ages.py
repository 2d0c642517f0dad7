"""The mismatch of learner and sampler by age: how many updates a token's sampler is behind the weights that learn it.

An update of a batch finds its tokens as many updates old as the batch had before it, and each weight version published
since they were sampled (`rollout.max_staleness`) counts `learner.mini_batches` of them. At age 0 sampler and learner
have the same weights, and what parts them is precision and kernels; what they are further apart later is staleness.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

from dataclasses import dataclass

import torch

from learner.batching import Batch
from learner.processes import Processes


@dataclass(frozen=True)
class MismatchByAge:
    """Lists of one length, by rising age. age: in updates. mean_abs: |log π_learner - log π_sampler| over the response
    tokens of that age, at the weights that their update moves, nats. tokens: how many there are."""

    age: tuple[int, ...] = ()
    mean_abs: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


class Ages:
    """Of one batch, filled in update by update. of_rows: each sequence's age in updates, int64 [B], -1 where it was in
    none."""

    def __init__(self, batch: Batch, mini_batches: int):
        self.of_rows = torch.full_like(batch.length, -1)
        behind = torch.zeros_like(batch.length) if batch.versions_behind is None else batch.versions_behind
        self._at_first = behind * mini_batches
        self._tokens = batch.response_mask.sum(-1)
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, update: int, index: torch.Tensor) -> None:
        """The batch's update of that number, from 0, learns from the rows at `index`, int64 [n]."""
        self.of_rows[index] = self._at_first[index] + update

    def add(self, index: torch.Tensor, current: torch.Tensor, rows: Batch) -> None:
        """This process's part: the learner's log-probs of the rows at `index`, fp32 [n, t]; rows: those, where
        `current` is. Waits for no device."""
        apart = (current.detach() - rows.sampler_logprobs).abs() * rows.response_mask
        self._sums.append((index, apart.sum(-1)))

    def mismatch(self, processes: Processes) -> MismatchByAge:
        """Of what all processes added, each of which had a share of the rows."""
        sums = torch.zeros(len(self.of_rows), dtype=torch.float64)
        if self._sums:
            index, added = (torch.cat(parts) for parts in zip(*self._sums, strict=True))
            sums[index] = added.double().cpu()
        sums = processes.total(sums)
        ages = self.of_rows.unique().tolist()
        found = [(age, self.of_rows == age) for age in ages if age >= 0]
        return MismatchByAge(
            age=tuple(age for age, _ in found),
            mean_abs=tuple(float(sums[rows].sum()) / int(self._tokens[rows].sum()) for _, rows in found),
            tokens=tuple(int(self._tokens[rows].sum()) for _, rows in found),
        )
