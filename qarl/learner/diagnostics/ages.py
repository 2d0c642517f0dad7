"""The mismatch of learner and sampler by age: how many updates a token's sampler is behind the
weights that learn it.

An update of a batch finds its tokens as many updates old as the batch had before it, and each
weight version published since they were sampled (`rollout.max_staleness`) counts
`learner.mini_batches` of them. At age 0 sampler and learner have the same weights, and what parts
them is precision and kernels; what they are further apart later is staleness.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1; k numbers of versions.
"""

from dataclasses import dataclass
from typing import Any

import torch

from qarl.learner.diagnostics.base import Learning, MicroBatch, Observer
from qarl.learner.diagnostics.figure import Figure


@dataclass(frozen=True)
class MismatchByAge:
    """Lists of one length, by rising age. age: in updates. mean_abs: |log π_learner - log
    π_sampler| over the response tokens of that age, at the weights that their update moves, nats.
    tokens: how many there are.
    """

    age: tuple[int, ...] = ()
    mean_abs: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


class MismatchByAgeMeter(Observer):
    """Filled in update by update: sums of tokens so many versions behind, [B, k]."""

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
        mask, behind = batch.response_mask, batch.versions_behind
        if behind is None:
            self._behind, self._tokens = (
                torch.zeros(1, dtype=torch.int64),
                mask.sum(-1, keepdim=True),
            )
        else:
            self._behind = behind[mask].unique()
            self._tokens = torch.stack(
                [((behind == k) & mask).sum(-1) for k in self._behind], dim=-1
            )
        self._update = torch.full_like(batch.length, -1)
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """Note the rows' update."""
        self._update[index] = update

    def micro_batch(self, micro: MicroBatch) -> None:
        """Add up this process's part, without waiting for the device."""
        rows = micro.rows
        apart = (micro.current.detach() - rows.sampler_logprobs).abs() * rows.response_mask
        behind = rows.versions_behind
        of_each = [
            apart if behind is None else apart * (behind == k) for k in self._behind.tolist()
        ]
        self._sums.append((micro.index, torch.stack([part.sum(-1) for part in of_each], dim=-1)))

    def record(self) -> dict[str, Any]:
        """`ages`; and into the log the age of each sequence's oldest token."""
        if self.learning.log is not None:
            self.learning.log.age = self._ages().amax(-1)
        return {"ages": self._mismatch()}

    def _mismatch(self) -> MismatchByAge:
        """Of what all processes added, each of which had a share of the rows."""
        sums = torch.zeros(self._tokens.shape, dtype=torch.float64)
        if self._sums:
            index, added = (torch.cat(parts) for parts in zip(*self._sums, strict=True))
            sums[index] = added.double().cpu()
        sums, ages = self.learning.processes.total(sums), self._ages()
        by_age = [(age, ages == age) for age in ages.unique().tolist() if age >= 0]
        return MismatchByAge(
            age=tuple(age for age, _ in by_age),
            mean_abs=tuple(
                float(sums[some].sum()) / int(self._tokens[some].sum()) for _, some in by_age
            ),
            tokens=tuple(int(self._tokens[some].sum()) for _, some in by_age),
        )

    def _ages(self) -> torch.Tensor:
        """Of a sequence's tokens so many versions behind, int64 [B, k]; -1 where it has none, or
        was in no update.
        """
        update = self._update[:, None]
        return torch.where(
            (self._tokens > 0) & (update >= 0),
            update + self._behind * self.learning.config.mini_batches,
            -1,
        )
