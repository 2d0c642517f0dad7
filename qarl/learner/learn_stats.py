"""What one call of `Learner.learn` reports."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qarl.learner.loss.metrics import LossMetrics, mean
from qarl.learner.mismatch import Mismatch
from qarl.learner.row_logprobs import RowLogprobs


@dataclass(frozen=True, kw_only=True)
class LearnStats(LossMetrics):
    """A batch: means of `LossMetrics` over its updates, but for update_log_ratio, which is the last
    mini-batch's.

    mismatch, entropy (nats a token): before the first update, of the sequences whose old log-probs
    are known (`Learner.learn`). lr: learning rate. grad_norm: before clipping, mean. updates,
    skipped: optimizer steps taken, and left out because gradients were not finite. loss_scale:
    after the batch. seconds: wall time of the phases old (log-probs before the update), forward
    (with the loss), backward, optimizer and materialize; see `Stopwatch` for what they mean on
    CUDA. records: the diagnostics' metrics (`diagnostics.base.Observer.record`).
    """

    mismatch: Mismatch
    lr: float
    grad_norm: float
    entropy: float
    updates: int
    skipped: int
    loss_scale: float
    seconds: dict[str, float] = field(compare=False)
    records: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """taken: whether the optimizer stepped; grad_norm: 0 where it did not."""

    metrics: LossMetrics
    grad_norm: float
    taken: bool


def batch_stats(
    updates: Sequence[Update],
    old: RowLogprobs,
    lr: float,
    loss_scale: float,
    seconds: dict[str, float],
    records: dict[str, Any],
) -> LearnStats:
    """What a batch's updates come to. old: the log-probs before them."""
    taken = sum(update.taken for update in updates)
    last = updates[-1].metrics.update_log_ratio if updates else 0.0
    return LearnStats(
        **vars(replace(mean([update.metrics for update in updates]), update_log_ratio=last)),
        mismatch=old.mismatch(),
        lr=lr,
        # 0 where skipped
        grad_norm=sum(update.grad_norm for update in updates) / max(taken, 1),
        entropy=old.entropy,
        updates=taken,
        skipped=len(updates) - taken,
        loss_scale=loss_scale,
        seconds=seconds,
        records=records,
    )
