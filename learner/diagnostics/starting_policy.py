"""How far the policy has gone from the one the run started with, which is not kept.

KL(π_start ‖ π) on completions that π_start sampled: some of the first batch's, whose log-probs are noted before
anything is updated. So a run holds a few rows of numbers, where a penalty's reference is a second model, and a
measurement is one forward of those rows. The other direction, on present completions, needs π_start itself: `learn/kl`,
with a penalty.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import dataclasses
from typing import Any

import torch

from qarl.learner.batching import Batch
from qarl.learner.diagnostics.base import Learning, Observer, is_due
from qarl.learner.diagnostics.decomposition import sample_rows
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.layers.context import Forward

SAMPLE_TOKENS = 1024
"""Prompts and responses of the sample, at most; one sequence at least."""

_KEPT = ("tokens", "length", "response_mask", "sampler_logprobs")


class StartingPolicy:
    """Of one run. started: whether there was an update, or one begins. sample: rows of the first batch whose sampler is
    the policy itself, its published codes before any update; None without measurements."""

    def __init__(self) -> None:
        self.started = False
        self.sample: Batch | None = None

    def begin(self, sample: Batch | None) -> None:
        """Before the run's first update."""
        self.started, self.sample = True, sample

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The sample, for a checkpoint; empty without one, None before the first update."""
        if not self.started:
            return None
        return {} if self.sample is None else {name: getattr(self.sample, name) for name in _KEPT}

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        """Take over a `state_dict`: a run that has begun without a sample stays without one."""
        self.started = state is not None
        self.sample = None
        if state:
            kept = {name: tensor.clone() for name, tensor in state.items()}
            group, advantages = torch.zeros_like(kept["length"]), torch.zeros_like(kept["sampler_logprobs"])
            self.sample = Batch(**kept, group=group, advantages=advantages)


class StartDistance(Observer):
    """The run's `StartingPolicy`, measured in the steps that diagnose."""

    def __init__(self, learning: Learning, start: StartingPolicy):
        super().__init__(learning)
        self._start = start

    def before_batch(self) -> None:
        """Take the run's sample, before its first update."""
        learning = self.learning
        if self._start.started or not learning.trained:
            return
        if not learning.config.diagnostics_every:
            self._start.begin(None)
            return
        sample = learning.batch.rows(sample_rows(learning.batch, learning.trained[0], SAMPLE_TOKENS))
        # Routed by the router, then and later.
        sample = dataclasses.replace(sample, experts=None, ended=None, versions_behind=None)
        self._start.begin(dataclasses.replace(sample, sampler_logprobs=self._logprobs(sample)))

    def record(self) -> dict[str, Any]:
        """`kl_from_start`: KL(π_start ‖ π), nats a token, estimated by k3 (`learner.mismatch.Mismatch`)."""
        sample = self._start.sample
        if sample is None or not is_due(self.learning.config.diagnostics_every, self.learning.step):
            return {"kl_from_start": None}
        with self.learning.stopwatch("shadow"):
            now = self._logprobs(sample)
            return {"kl_from_start": measure_mismatch(now, sample.sampler_logprobs, sample.response_mask).k3}

    def _logprobs(self, sample: Batch) -> torch.Tensor:
        """By the published codes."""
        computed, model = RowLogprobs(sample), self.learning.model
        with model.forward_as(Forward.PUBLISHED):
            self.learning.add_logprobs(computed, model, torch.arange(len(sample.tokens)))
        return computed.values
