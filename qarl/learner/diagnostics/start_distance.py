"""How far the policy has gone from the one the run started with, which is not kept.

KL(π_start ‖ π) on completions that π_start sampled: some of the first batch's, whose log-probs are
noted before anything is updated. So a run holds a few rows of numbers, where a penalty's reference
is a second model, and a measurement is one forward of those rows. The other direction, on present
completions, needs π_start itself: `learn/kl`, with a penalty.

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
"""Prompts and responses of the sample, at most; one sequence at least."""


class StartDistance(Observer):
    """The run's `StartingPolicy`, measured in the steps that diagnose."""

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
        sample = learning.batch.rows(
            sample_rows(learning.batch, learning.trained[0], SAMPLE_TOKENS)
        )
        # Routed by the router, then and later.
        sample = dataclasses.replace(sample, experts=None, ended=None, versions_behind=None)
        learning.start.begin(dataclasses.replace(sample, sampler_logprobs=self._logprobs(sample)))

    def record(self) -> dict[str, Any]:
        """`kl_from_start`: KL(π_start ‖ π), nats a token, estimated by k3
        (`learner.mismatch.Mismatch`).
        """
        sample = self.learning.start.sample
        if sample is None or not is_due(self.learning.config.diagnostics_every, self.learning.step):
            return {"kl_from_start": None}
        with self.learning.stopwatch("shadow"):
            now = self._logprobs(sample)
            return {
                "kl_from_start": (
                    measure_mismatch(now, sample.sampler_logprobs, sample.response_mask).k3
                )
            }

    def _logprobs(self, sample: Batch) -> torch.Tensor:
        """By the published codes."""
        return self.learning.logprobs(sample, torch.arange(len(sample.tokens)), Forward.PUBLISHED)
