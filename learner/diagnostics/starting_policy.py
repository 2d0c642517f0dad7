"""How far the policy has gone from the one the run started with, which is not kept.

KL(π_start ‖ π) on completions that π_start sampled: some of the first batch's, whose log-probs are noted before
anything is updated. So a run holds a few rows of numbers, where a penalty's reference is a second model, and a
measurement is one forward of those rows. The other direction, on present completions, needs π_start itself: `learn/kl`,
with a penalty.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from qarl.learner.batching import Batch
from qarl.learner.diagnostics.base import Learning, Observer, is_due
from qarl.learner.diagnostics.decomposition import sample_rows
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.layers.context import Forward
from qarl.quant.model.low_bit_model import LowBitModel

SAMPLE_TOKENS = 1024
"""Prompts and responses of the sample, at most; one sequence at least."""

_KEPT = ("tokens", "length", "response_mask", "sampler_logprobs")


class StartingPolicy:
    """Of one run. model: the policy, whose published codes are measured. add_logprobs: computes a model's log-probs of
    the rows at an index, by all processes together."""

    def __init__(self, model: LowBitModel, add_logprobs: Callable[[RowLogprobs, LowBitModel, torch.Tensor], None]):
        self._model, self._add_logprobs = model, add_logprobs
        self._sample: Batch | None = None  # its sampler is the policy itself, before any update
        self._started = False

    def note(self, batch: Batch, rows: torch.Tensor | None) -> None:
        """Before the first update of the run: take a sample of the rows, int64 [n], or none. Later calls do nothing."""
        if self._started:
            return
        self._started = True
        if rows is not None:
            sample = batch.rows(sample_rows(batch, rows, SAMPLE_TOKENS))
            # Routed by the router, then and later.
            sample = dataclasses.replace(sample, experts=None, ended=None, versions_behind=None)
            self._sample = dataclasses.replace(sample, sampler_logprobs=self._logprobs(sample))

    def kl(self) -> float | None:
        """KL(π_start ‖ π), nats a token, estimated by k3 (`learner.mismatch.Mismatch`); None without a sample."""
        if self._sample is None:
            return None
        now = self._logprobs(self._sample)
        return measure_mismatch(now, self._sample.sampler_logprobs, self._sample.response_mask).k3

    def _logprobs(self, sample: Batch) -> torch.Tensor:
        computed = RowLogprobs(sample)
        with self._model.forward_as(Forward.PUBLISHED):
            self._add_logprobs(computed, self._model, torch.arange(len(sample.tokens)))
        return computed.values

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The sample, for a checkpoint; empty without one, None before the first update."""
        if not self._started:
            return None
        return {} if self._sample is None else {name: getattr(self._sample, name) for name in _KEPT}

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        """Take over a `state_dict`: a run that has begun without a sample stays without one."""
        self._started = state is not None
        self._sample = None
        if state:
            kept = {name: tensor.clone() for name, tensor in state.items()}
            group, advantages = torch.zeros_like(kept["length"]), torch.zeros_like(kept["sampler_logprobs"])
            self._sample = Batch(**kept, group=group, advantages=advantages)


class StartDistance(Observer):
    """The run's `StartingPolicy`, measured in the steps that diagnose."""

    def __init__(self, learning: Learning, start: StartingPolicy):
        super().__init__(learning)
        self._start = start

    def before_batch(self) -> None:
        """Take the run's sample, before its first update."""
        if self.learning.trained:
            self._start.note(
                self.learning.batch, self.learning.trained[0] if self.learning.config.diagnostics_every else None
            )

    def record(self) -> dict[str, Any]:
        """`kl_from_start`."""
        if not is_due(self.learning.config.diagnostics_every, self.learning.step):
            return {"kl_from_start": None}
        with self.learning.stopwatch("shadow"):
            return {"kl_from_start": self._start.kl()}
