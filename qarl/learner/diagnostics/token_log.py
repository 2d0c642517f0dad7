"""A log of every token of a batch's updates (`Learner.learn(…, log=…)`).

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

from collections.abc import Sequence

import torch

from qarl.learner.batching import Batch
from qarl.learner.loss.tokens import LossTokens
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs


class TokenLog:
    """Log of every token, filled in by one call of `Learner.learn`.

    Each sequence is in one of the batch's updates, or in none if its whole mini-batch has no
    advantage.

    shown: rows that are likely to be looked at, the most likely first.
    """

    def __init__(self, batch: Batch, shown: Sequence[int] = ()):
        self.batch = batch
        self.shown = torch.tensor(shown, dtype=torch.int64)
        """Rows that are likely to be looked at, the most likely first, int64 [m]."""
        self.unquantized = RowLogprobs(batch)
        """Log-probs by the unquantized policy before the updates, of as many `shown` rows as are
        affordable. Only an aligned learner computes them, and only in steps that diagnose
        (`diagnostics.decomposition`).
        """
        self.age = torch.full_like(batch.length, -1)
        """Age of each sequence's oldest token, in updates (`diagnostics.ages`), int64 [B]; -1:
        in no update.
        """
        self.old = torch.zeros_like(batch.sampler_logprobs)
        """Log-probs by the learner before the updates, fp32 [B, T-1]."""
        self.known = torch.zeros(len(batch.tokens), dtype=torch.bool)
        """Whether the sequence's `old` is known, bool [B]."""
        self.log_ratio = torch.zeros_like(batch.sampler_logprobs)
        """log π_cur - log π_proximal at the sequence's update, fp32 [B, T-1]."""
        self.clip = torch.zeros(batch.response_mask.shape, dtype=torch.int32)
        """Index in `CLIP_REASONS`, int32 [B, T-1]."""
        self.updated = torch.zeros(len(batch.tokens), dtype=torch.bool)
        """Whether the sequence was in an update, so that it has `log_ratio` and `clip`, bool
        [B].
        """

    def add(self, index: torch.Tensor, tokens: LossTokens) -> None:
        """Add one micro-batch: the rows at `index`, int64 [n]."""
        columns = tokens.log_ratio.shape[1]
        self.log_ratio[index, :columns] = tokens.log_ratio.cpu()
        self.clip[index, :columns] = tokens.clip.cpu()
        self.updated[index] = True

    def complete(self, old: RowLogprobs, processes: Processes) -> None:
        """Sum what the processes added, and add the old log-probs.

        Each process added its share of the rows.
        """
        self.old = old.values
        self.known = old.known
        processes.all_reduce(self.log_ratio)
        processes.all_reduce(self.clip)
        self.updated = processes.all_reduce(self.updated.int()) > 0
