"""What watches a batch being learned: a diagnostic is one file, and one line in
`learner.diagnostics.observers`.

Axes: B sequences, T tokens, of which T-1 are predicted; n of B, t of T-1.
"""

from collections.abc import Callable
from dataclasses import dataclass
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

_KEPT = ("tokens", "length", "response_mask", "sampler_logprobs")


class StartingPolicy:
    """Of one run. started: whether there was an update, or one begins. sample: rows of the first
    batch whose sampler is the policy itself, its published codes before any update; None without
    measurements.
    """

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
            group, advantages = (
                torch.zeros_like(kept["length"]),
                torch.zeros_like(kept["sampler_logprobs"]),
            )
            self.sample = Batch(**kept, group=group, advantages=advantages)


@dataclass(frozen=True)
class Learning:
    """One batch being learned, as observers see it. step: of the training, from 0. trained: rows of
    each of its mini-batches that have an advantage, int64 [n]. old, reference: the learner's
    log-probs before the updates, and those of a KL penalty's reference, as they come to be known.
    start: of the run. add_logprobs: computes a model's log-probs of the rows at an index, by all
    processes together.
    """

    batch: Batch
    step: int
    trained: list[torch.Tensor]
    config: LearnerConfig
    model: LowBitModel
    processes: Processes
    stopwatch: Stopwatch
    old: RowLogprobs
    reference: RowLogprobs | None
    log: TokenLog | None
    start: StartingPolicy
    add_logprobs: Callable[[RowLogprobs, LowBitModel, torch.Tensor], None]

    def logprobs(self, batch: Batch, rows: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Of rows of that batch, int64 [n], by the present model's forward of that kind: fp32 [n,
        T-1].
        """
        computed = RowLogprobs(batch)
        with self.model.forward_as(forward):
            self.add_logprobs(computed, self.model, rows)
        return computed.values[rows]

    def is_last(self, update: int) -> bool:
        """Whether the update of that number, from 0, is the batch's last one."""
        return update == len(self.trained) - 1


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this process after its backward. update: its update's number, from 0.
    index: its rows, int64 [n]. rows: those. current, entropies: of the learner's own forward, [n,
    t] on the model's device, entropies 0 where none were computed. tokens: what the loss made of
    each.
    """

    update: int
    index: torch.Tensor
    rows: Batch
    current: torch.Tensor
    entropies: torch.Tensor
    tokens: LossTokens


class Observer:
    """Watches one batch. Every process calls every method, in the same order: what they compute
    together they may compute here. Nothing here changes what is learned.

    figures: what `qarl report` draws of its metrics, written into a run's start.json.
    counts_arrivals: whether optimizer steps have to count what arrives of them. flips: counts the
    codes that materializations change, None where nobody asks.
    """

    figures: ClassVar[tuple[Figure, ...]] = ()
    counts_arrivals = False
    flips: FlipCount | None = None

    def __init__(self, learning: Learning):
        self.learning = learning

    def before_batch(self) -> None:
        """Before anything else is computed of the batch."""

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """Before the update of that number, from 0, of the rows at `index`, int64 [n]."""

    def micro_batch(self, micro: MicroBatch) -> None:
        """After the backward of a micro-batch. Should wait for no device."""

    def after_update(self, update: int, arrived: UpdateDiagnostics | None) -> None:
        """After an update, whose weight version is materialized. arrived: with
        `counts_arrivals`.
        """

    def record(self) -> dict[str, Any]:
        """The diagnostic's metrics by name (`LearnStats.records`), once the batch is learned:
        numbers, None where nothing was measured, or dataclasses of these, whose fields are metrics
        of their own.
        """
        return {}


def is_due(every: int, step: int) -> bool:
    """Whether training step `step` (from 0) is measured: the first one, and each `every`-th from
    there; 0: none.
    """
    return every > 0 and step % every == 0
