"""What one call of `Learner.learn` reports."""

from dataclasses import dataclass, field

from qarl.learner.diagnostics.ages import MismatchByAge
from qarl.learner.diagnostics.decomposition import Decomposition
from qarl.learner.diagnostics.lost_updates import LayerChanges
from qarl.learner.loss.metrics import LossMetrics
from qarl.learner.mismatch import Mismatch


@dataclass(frozen=True, kw_only=True)
class LearnStats(LossMetrics):
    """A batch: means of `LossMetrics` over its updates, but for update_log_ratio, which is the last mini-batch's.

    mismatch, entropy (nats a token): before the first update, of the sequences whose old log-probs are known
    (`Learner.learn`). lr: learning rate. grad_norm: before clipping, mean. updates, skipped: optimizer steps taken, and
    left out because gradients were not finite. loss_scale: after the batch. seconds: wall time of the phases old
    (log-probs before the update), forward (with the loss), backward, optimizer and materialize; see `Stopwatch` for
    what they mean on CUDA. lost_updates, crossed_bfloat16, flipped_codes, layers: see `diagnostics.lost_updates`, None
    where they were not measured; log_ratio: see `diagnostics.decomposition`, kl_from_start: nats a token, see
    `diagnostics.starting_policy`; both in the same steps.
    ages: see `diagnostics.ages`."""

    mismatch: Mismatch
    lr: float
    grad_norm: float
    entropy: float
    updates: int
    skipped: int
    loss_scale: float
    seconds: dict[str, float] = field(compare=False)
    lost_updates: float | None = None
    crossed_bfloat16: float | None = None
    flipped_codes: float | None = None
    layers: LayerChanges = field(default_factory=LayerChanges)
    log_ratio: Decomposition = field(default_factory=Decomposition)
    kl_from_start: float | None = None
    ages: MismatchByAge = field(default_factory=MismatchByAge)
