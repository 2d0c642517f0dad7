"""What one call of `Learner.learn` reports."""

from dataclasses import dataclass, field
from typing import Any

from qarl.learner.loss.metrics import LossMetrics
from qarl.learner.mismatch import Mismatch


@dataclass(frozen=True, kw_only=True)
class LearnStats(LossMetrics):
    """A batch: means of `LossMetrics` over its updates, but for update_log_ratio, which is the last mini-batch's.

    mismatch, entropy (nats a token): before the first update, of the sequences whose old log-probs are known
    (`Learner.learn`). lr: learning rate. grad_norm: before clipping, mean. updates, skipped: optimizer steps taken, and
    left out because gradients were not finite. loss_scale: after the batch. seconds: wall time of the phases old
    (log-probs before the update), forward (with the loss), backward, optimizer and materialize; see `Stopwatch` for
    what they mean on CUDA. records: the diagnostics' metrics (`diagnostics.base.Observer.record`)."""

    mismatch: Mismatch
    lr: float
    grad_norm: float
    entropy: float
    updates: int
    skipped: int
    loss_scale: float
    seconds: dict[str, float] = field(compare=False)
    records: dict[str, Any] = field(default_factory=dict)
