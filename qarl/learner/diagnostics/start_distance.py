"""The distance of the policy from the one the run started with, without a copy of that.

It is KL(π_start ‖ π) on completions that π_start sampled: some of the first batch's, whose
log-probs are stored before anything is updated. So a run stores a few rows of numbers, while a
penalty's reference is a second model, and a measurement is one forward of those rows. The other
direction, on present completions, needs π_start itself: `learn/kl`, with a penalty.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import dataclasses
from typing import Any

import torch

from qarl.learner.batching import Batch
from qarl.learner.diagnostics.base import Observer, is_due
from qarl.learner.diagnostics.decomposition import sample_rows
from qarl.learner.diagnostics.figure import Figure
from qarl.learner.mismatch import measure_mismatch
from qarl.quant.layers.context import Forward

SAMPLE_TOKENS = 1024
"""Upper limit of the sample's prompt and response tokens; it has one sequence at least."""


class StartDistance(Observer):
    """Observer of the distance from the run's `StartingPolicy`, in the steps that diagnose."""

    figures = (
        Figure(
            id="start",
            title="Distance from the start",
            unit="nats a token",
            help="KL(π_start ‖ π) on completions of the starting policy.",
            lines={"KL": "learn/kl_from_start"},
        ),
    )

    def before_batch(self) -> None:
        """Take the run's sample, before its first update."""
        learning = self.learning
        if learning.start.started or not learning.trained:
            return
        if not learning.config.diagnostics_every:
            learning.start.begin(None)
            return
        rows = sample_rows(learning.batch, learning.trained[0], SAMPLE_TOKENS)
        sample = learning.batch.rows(rows)
        # Without the sampler's routing: the router routes the sample, now and at each measurement.
        sample = dataclasses.replace(sample, experts=None, ended=None, versions_behind=None)
        learning.start.begin(dataclasses.replace(sample, sampler_logprobs=self._logprobs(sample)))

    def record(self) -> dict[str, Any]:
        """Return `kl_from_start`: KL(π_start ‖ π), nats a token.

        It is estimated by k3 (`learner.mismatch.Mismatch`).
        """
        sample = self.learning.start.sample
        if sample is None or not is_due(self.learning.config.diagnostics_every, self.learning.step):
            return {"kl_from_start": None}
        with self.learning.stopwatch("shadow"):
            now = self._logprobs(sample)
            mismatch = measure_mismatch(now, sample.sampler_logprobs, sample.response_mask)
            return {"kl_from_start": mismatch.k3}

    def _logprobs(self, sample: Batch) -> torch.Tensor:
        """Return log-probs of the sample by the published codes."""
        return self.learning.logprobs(sample, torch.arange(len(sample.tokens)), Forward.PUBLISHED)
