"""What a batch's updates made of every token, for those who want to look at tokens
(`Learner.learn(…, log=…)`).

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

from collections.abc import Sequence

import torch

from qarl.learner.batching import Batch
from qarl.learner.loss.tokens import LossTokens
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs


class TokenLog:
    """Filled in by one call of `Learner.learn`. Each sequence is in one of its updates, or in none
    where the whole mini-batch has no advantage.

    old: the learner's log-probs before the updates, fp32 [B, T-1]; known: bool [B], the sequences
    it has them of. log_ratio: log π_cur - log π_proximal at the sequence's update, fp32 [B, T-1];
    clip: int32 [B, T-1], place in `CLIP_REASONS`; updated: bool [B], the sequences that have these
    two. age: of each sequence's oldest token, in updates, int64 [B], -1 for those in none
    (`diagnostics.ages`).

    shown: rows that are likely to be looked at, int64 [m], those looked at first first.
    unquantized: of as many of them as are affordable, log-probs of the unquantized policy before
    the updates; of an aligned learner, in steps that diagnose (`diagnostics.decomposition`), else
    of none.
    """

    def __init__(self, batch: Batch, shown: Sequence[int] = ()):
        self.batch = batch
        self.shown = torch.tensor(shown, dtype=torch.int64)
        self.unquantized = RowLogprobs(batch)
        self.age = torch.full_like(batch.length, -1)
        self.old = torch.zeros_like(batch.sampler_logprobs)
        self.known = torch.zeros(len(batch.tokens), dtype=torch.bool)
        self.log_ratio = torch.zeros_like(batch.sampler_logprobs)
        self.clip = torch.zeros(batch.response_mask.shape, dtype=torch.int32)
        self.updated = torch.zeros(len(batch.tokens), dtype=torch.bool)

    def add(self, index: torch.Tensor, tokens: LossTokens) -> None:
        """One micro-batch: the rows at `index`, int64 [n]."""
        columns = tokens.log_ratio.shape[1]
        self.log_ratio[index, :columns] = tokens.log_ratio.cpu()
        self.clip[index, :columns] = tokens.clip.cpu()
        self.updated[index] = True

    def complete(self, old: RowLogprobs, processes: Processes) -> None:
        """Put together what the processes added, each of which had a share of the rows, and the
        log-probs before.
        """
        self.old, self.known = old.values, old.known
        processes.total(self.log_ratio)
        processes.total(self.clip)
        self.updated = processes.total(self.updated.int()) > 0
