"""The report of one call of `Learner.learn`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qarl.learner.loss.metrics import LossMetrics, mean
from qarl.learner.mismatch import Mismatch
from qarl.learner.row_logprobs import RowLogprobs


@dataclass(frozen=True, kw_only=True)
class LearnStats(LossMetrics):
    """Statistics of a batch: means of `LossMetrics` over its updates, and figures of the whole
    batch.

    `update_log_ratio` is not a mean, but that of the last mini-batch.
    """

    mismatch: Mismatch
    """Mismatch before the first update, over the sequences whose old log-probs are known
    (`Learner.learn`).
    """
    lr: float
    """Learning rate."""
    grad_norm: float
    """Mean of the gradient norm before clipping over the updates taken."""
    entropy: float
    """Mean entropy before the first update over the same sequences as `mismatch`, nats a token."""
    updates: int
    """Number of optimizer steps taken."""
    skipped: int
    """Number of optimizer steps left out because gradients were not finite."""
    loss_scale: float
    """Loss scale after the batch."""
    seconds: dict[str, float] = field(compare=False)
    """Wall time by phase: old (log-probs before the update), forward (with the loss), backward,
    optimizer and materialize. `Stopwatch` says what it means on CUDA.
    """
    records: dict[str, Any] = field(default_factory=dict)
    """Metrics of the diagnostics (`diagnostics.base.Observer.record`)."""


@dataclass(frozen=True)
class Update:
    """Result of one mini-batch."""

    metrics: LossMetrics
    """Metrics of its loss."""
    grad_norm: float
    """Gradient norm before clipping; 0 if the optimizer did not step."""
    taken: bool
    """Whether the optimizer stepped."""


def batch_stats(
    updates: Sequence[Update],
    old: RowLogprobs,
    lr: float,
    loss_scale: float,
    seconds: dict[str, float],
    records: dict[str, Any],
) -> LearnStats:
    """Return the statistics of a batch's updates. old: the log-probs before them."""
    taken = sum(update.taken for update in updates)
    metrics = mean([update.metrics for update in updates])
    last = updates[-1].metrics.update_log_ratio if updates else 0.0
    # A skipped update has a norm of 0, so the sum is over the updates taken.
    norms = sum(update.grad_norm for update in updates)
    return LearnStats(
        **vars(replace(metrics, update_log_ratio=last)),
        mismatch=old.mismatch(),
        lr=lr,
        grad_norm=norms / max(taken, 1),
        entropy=old.entropy,
        updates=taken,
        skipped=len(updates) - taken,
        loss_scale=loss_scale,
        seconds=seconds,
        records=records,
    )
