"""The interface of a diagnostic, which watches a batch being learned.

A diagnostic is one file, and one line in `learner.diagnostics.observers`.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.learner.batching import Batch
from qarl.learner.diagnostics.figure import Figure
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.learner.loss.tokens import LossTokens
from qarl.learner.optim.optimizer import UpdateDiagnostics
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs
from qarl.learner.stopwatch import Stopwatch
from qarl.quant.layers.context import Forward
from qarl.quant.materialize.code_changes import FlipCount
from qarl.quant.model.low_bit_model import LowBitModel

_SAMPLE_FIELDS = (
    *("tokens", "length", "response_mask", "sampler_logprobs"),
    *("picture_rows", "picture_index", "picture_positions", "picture_sees"),
)
"""Fields of the sample that a checkpoint stores, those of pictures if it has some; the others
follow from them, or are not used.
"""


class StartingPolicy:
    """The policy with which a run started, represented by a sample of its completions."""

    def __init__(self) -> None:
        self.started = False
        """Whether the run's first update was taken, or is about to be."""
        self.sample: Batch | None = None
        """Rows of the first batch whose sampler log-probs are those of the starting policy, by its
        published codes. None if nothing is measured.
        """

    def begin(self, sample: Batch | None) -> None:
        """Store the sample, before the run's first update."""
        self.started = True
        self.sample = sample

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the sample, for a checkpoint.

        It is empty if the run has started without a sample, and None before the first update.
        """
        if not self.started:
            return None
        if self.sample is None:
            return {}
        fields = {name: getattr(self.sample, name) for name in _SAMPLE_FIELDS}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor] | None) -> None:
        """Restore a `state_dict`. A run that has started without a sample stays without one."""
        self.started = state is not None
        self.sample = None
        if state:
            fields = {name: tensor.clone() for name, tensor in state.items()}
            group = torch.zeros_like(fields["length"])
            advantages = torch.zeros_like(fields["sampler_logprobs"])
            self.sample = Batch(**fields, group=group, advantages=advantages)


@dataclass(frozen=True)
class Learning:
    """One batch being learned, as observers see it."""

    batch: Batch
    """The batch."""
    step: int
    """Training step, from 0."""
    trained: list[torch.Tensor]
    """Rows of each mini-batch that is trained, int64 [n]. Mini-batches without any advantage are
    left out.
    """
    config: LearnerConfig
    """The `learner` section of the configuration."""
    model: LowBitModel
    """The policy."""
    processes: Processes
    """The processes that learn together."""
    stopwatch: Stopwatch
    """Stopwatch of the learner's phases."""
    old: RowLogprobs
    """Log-probs by the learner before the updates, filled in as they are computed."""
    reference: RowLogprobs | None
    """Log-probs by the KL penalty's reference, filled in as they are computed; None without a
    penalty.
    """
    log: TokenLog | None
    """The caller's log of tokens, or None."""
    start: StartingPolicy
    """The policy with which the run started."""
    fill_logprobs: Callable[[RowLogprobs, torch.Tensor, LowBitModel], None]
    """Computes a model's log-probs of the rows at an index and writes them (`Scorer.fill`).
    Collective: all processes call it.
    """

    flips: FlipCount = field(default_factory=FlipCount)
    """Codes that the updates changed so far. It stays empty unless an observer `counts_changes`."""

    def logprobs(self, batch: Batch, rows: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Return log-probs of some rows of a batch by the present model, fp32 [n, T-1].

        rows: int64 [n]. forward: kind of forward.
        """
        computed = RowLogprobs(batch)
        with self.model.forward_as(forward):
            self.fill_logprobs(computed, rows, self.model)
        return computed.values[rows]

    def is_last(self, update: int) -> bool:
        """Return whether the update of that number, from 0, is the batch's last one."""
        return update == len(self.trained) - 1


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this process, after its backward."""

    update: int
    """Number of its update, from 0."""
    index: torch.Tensor
    """Its rows' indices in the batch, int64 [n]."""
    rows: Batch
    """Its rows."""
    current: torch.Tensor
    """Log-probs by the learner's own forward, fp32 [n, t] on the model's device, with gradient."""
    entropies: torch.Tensor
    """Entropies of the learner's own forward, same shape; 0 if they were not computed."""
    tokens: LossTokens
    """Values that the loss computed for each token."""


class Observer:
    """Base class of a diagnostic, which watches one batch.

    Every process calls every method, in the same order, so methods may use collectives. An observer
    never changes what is learned.
    """

    figures: ClassVar[tuple[Figure, ...]] = ()
    """Charts of its metrics in `qarl report`, written into a run's start.json."""
    counts_changes = False
    """Whether the weights and codes that each update changes have to be counted for it."""

    def __init__(self, learning: Learning):
        self.learning = learning

    def before_batch(self) -> None:
        """Observe the batch before anything else is computed of it."""

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """Observe the policy before an update.

        update: number of the update, from 0. index: its rows, int64 [n].
        """

    def micro_batch(self, micro: MicroBatch) -> None:
        """Observe a micro-batch after its backward. Should not wait for a device."""

    def after_update(self, update: int, diagnostics: UpdateDiagnostics | None) -> None:
        """Observe the policy after an update, when its weight version is materialized.

        diagnostics: what the update changed; None unless an observer `counts_changes`.
        """

    def record(self) -> dict[str, Any]:
        """Return the diagnostic's metrics by name, once the batch is learned.

        They become `LearnStats.records`. A metric is a number, None if it was not measured, or a
        dataclass whose fields are metrics.
        """
        return {}


def is_due(every: int, step: int) -> bool:
    """Return whether training step `step` (from 0) is measured.

    Step 0 is, and every `every`-th step after it. With `every` 0 no step is.
    """
    return every > 0 and step % every == 0
