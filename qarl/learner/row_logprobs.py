"""Log-probs of a batch before its updates, or by the reference: computed in parts, by all processes
together.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

import torch

from qarl.learner.batching import Batch
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.processes import Processes


class RowLogprobs:
    """Log-probs of a batch by a policy as it was at one moment, row by row as they come to be
    known.

    values: fp32 [B, T-1], 0 where not known. known: bool [B].
    """

    def __init__(self, batch: Batch):
        self.batch = batch
        self.values = torch.zeros_like(batch.sampler_logprobs)
        self.known = torch.zeros(len(batch.tokens), dtype=torch.bool)
        self._entropy = torch.zeros(len(batch.tokens), dtype=torch.float64)

    def add(self, index: torch.Tensor, values: torch.Tensor, entropies: torch.Tensor) -> None:
        """This process's part: log-probs and entropies, [n, t] on any device, of the rows at
        `index`, int64 [n].
        """
        self.values[index, : values.shape[1]] = values.cpu()
        self._entropy[index] = entropies.double().sum(-1).cpu()

    def complete(self, index: torch.Tensor, processes: Processes) -> None:
        """The rows at `index` are known once what all processes added is summed up, each having had
        a share.
        """
        self.values[index] = processes.total(self.values[index])
        self._entropy[index] = processes.total(self._entropy[index])
        self.known[index] = True

    @property
    def entropy(self) -> float:
        """Mean over the known rows' tokens, nats."""
        return float(self._entropy[self.known].sum()) / int(
            self.batch.response_mask[self.known].sum()
        )

    def mismatch(self) -> Mismatch:
        """To the sampler, of the known rows."""
        rows, batch = self.known, self.batch
        ended = None if batch.ended is None else batch.ended[rows]
        sampler, mask, advantages = (
            t[rows] for t in (batch.sampler_logprobs, batch.response_mask, batch.advantages)
        )
        return measure_mismatch(self.values[rows], sampler, mask, advantages, ended)

    def rows_like(self, current: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows at `rows`, cut to the padding and moved to the device of `current`."""
        return self.values[rows][:, : current.shape[1]].to(current.device)
