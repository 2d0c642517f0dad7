"""Log-probs of a batch before its updates, or by the reference, computed in parts by all processes.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

import torch

from qarl.learner.batching import Batch
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.processes import Processes


class RowLogprobs:
    """Log-probs of a batch by one policy at one moment.

    They are filled in row by row as they are computed.
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        self.values = torch.zeros_like(batch.sampler_logprobs)
        """Log-probs, fp32 [B, T-1], 0 if unknown."""
        self.known = torch.zeros(len(batch.tokens), dtype=torch.bool)
        """Whether the row's log-probs are known, bool [B]."""
        self._entropy = torch.zeros(len(batch.tokens), dtype=torch.float64)
        """Sum of each row's entropies, nats, float64 [B]."""

    def write(
        self,
        index: torch.Tensor,
        values: torch.Tensor,
        entropies: torch.Tensor,
    ) -> None:
        """Write rows that this process computed. `all_reduce` sends them to the others.

        Args:
            index: rows, int64 [n].
            values: their log-probs, fp32 [n, t] on any device.
            entropies: their entropies, same shape.
        """
        self.values[index, : values.shape[1]] = values.cpu()
        self._entropy[index] = entropies.double().sum(-1).cpu()

    def all_reduce(self, index: torch.Tensor, processes: Processes) -> None:
        """Sum the rows at `index` over the processes, and mark them as known.

        One process wrote each of them, and they are 0 in the others.
        """
        self.values[index] = processes.all_reduce(self.values[index])
        self._entropy[index] = processes.all_reduce(self._entropy[index])
        self.known[index] = True

    @property
    def entropy(self) -> float:
        """Mean entropy over the known rows' tokens, nats."""
        tokens = int(self.batch.response_mask[self.known].sum())
        return float(self._entropy[self.known].sum()) / tokens

    def mismatch(self) -> Mismatch:
        """Return the mismatch between the known rows and the sampler."""
        rows = self.known
        batch = self.batch
        return measure_mismatch(
            learner=self.values[rows],
            sampler=batch.sampler_logprobs[rows],
            response_mask=batch.response_mask[rows],
            advantages=batch.advantages[rows],
            ended=None if batch.ended is None else batch.ended[rows],
        )

    def rows_like(self, index: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of the rows at `index`, cut to the width of `current`, fp32 [n, t].

        The result is on the device of `current`. index: int64 [n]. current: fp32 [n, t].
        """
        return self.values[index][:, : current.shape[1]].to(current.device)
