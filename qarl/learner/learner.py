"""The learner: it turns one batch of groups into stepped masters.

A batch gives old log-probs, is cut into mini-batches, and each of these gives straight-through
gradients and one optimizer step.

Axes: B sequences, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import KlConfig
from qarl.configs.seeds import step_seed
from qarl.learner.batching import Batch, mini_batches
from qarl.learner.diagnostics.base import (
    Learning,
    MicroBatch,
    Observer,
    StartingPolicy,
    is_due,
)
from qarl.learner.diagnostics.observers import OBSERVERS
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.learner.gradients import configure_backward
from qarl.learner.learn_stats import LearnStats, Update, batch_stats
from qarl.learner.load_balance import load_balance_coefficient, load_balance_loss
from qarl.learner.loss.aggregation import BatchSize
from qarl.learner.loss.loss import LossInput, LossShare, needs_old, policy_loss
from qarl.learner.loss.metrics import LossMetrics
from qarl.learner.mismatch import Mismatch, measure_mismatch
from qarl.learner.objectives.ratios import shadowed
from qarl.learner.optim.loss_scale import LossScale, require_finite_sampler
from qarl.learner.optim.schedule import make_schedule
from qarl.learner.optim.sharded import open_optimizer
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs
from qarl.learner.scorer import RankMicroBatch, Scorer
from qarl.learner.stopwatch import Stopwatch
from qarl.quant.model.kept_scales import load_scales_state, scales_state
from qarl.quant.model.low_bit_model import LowBitModel

FirstBatchGate = Callable[[Mismatch, Callable[[], Mismatch]], None]
"""Check that the first batch has to pass, called with its mismatch and with a function that
measures the rounding floor of a mismatch on the same batch.
"""


@dataclass(frozen=True)
class _MiniBatch:
    """Values that the micro-batches of one update share."""

    number: int
    """Number of the update, from 0."""
    size: BatchSize
    """Size of the mini-batch."""
    old_known: bool
    """Whether the old log-probs of its rows are known already."""
    supplies_old: bool
    """Whether its forward supplies the old log-probs. True in the first update, when no update was
    taken since the batch was sampled, if they are unknown.
    """
    shadow: RowLogprobs | None
    """Log-probs by the published codes, for ratios; None unless `learner.ratio_fix` asks for
    them.
    """


class Learner:
    """Owner of the policy's masters and their optimizer.

    Args:
        reference: policy from which a KL penalty measures; never stepped. It is required if
            `config.kl` asks for a penalty, and refused with `ConfigError` if not.
        processes: the processes that learn together. All get the same batch, and each computes its
            share of it. Default: this process alone.
        seed: seed of the run, which shuffles the batches.
        steps: number of training steps, after which the learning rate has decayed. None: unknown.
        temperature: sampling temperature of the completions. All log-probs are of the policy at it.
    """

    def __init__(
        self,
        model: LowBitModel,
        config: LearnerConfig,
        reference: LowBitModel | None = None,
        processes: Processes | None = None,
        seed: int = 0,
        steps: int | None = None,
        temperature: float = 1.0,
    ):
        if isinstance(config.kl, KlConfig) != (reference is not None):
            raise ConfigError(
                f"learner.kl.name is {config.kl.name!r}, but the learner was given "
                f"{'no' if reference is None else 'a'} reference policy"
            )
        self.model = model
        self.config = config
        self.processes = processes or Processes()
        self.optimizer = open_optimizer(model, config, self.processes)
        self.loss_scale = LossScale(model.context.compute_dtype == torch.float16)
        self._balance = load_balance_coefficient(model, config.router_aux_loss)
        model.router_log.enable(self._balance > 0)
        self._reference = reference
        self.scorer = Scorer(model, config, self.processes, temperature)
        configure_backward(model, config)
        self.stopwatch = Stopwatch()
        self.schedule = make_schedule(config.optimizer, steps)
        self._seed = seed
        self._starting_policy = StartingPolicy()
        self.batch_complete = True
        """Whether the masters are those of a finished batch: False if an error came between its
        updates.
        """

    def learn(
        self,
        batch: Batch,
        step: int,
        gate: FirstBatchGate | None = None,
        log: TokenLog | None = None,
    ) -> LearnStats:
        """Update the policy on the batch, one mini-batch after another, in shuffled order.

        Each update materializes the codes again; those of the last update are published as the
        next weight version. A mini-batch with a non-finite gradient is skipped and counted, and
        leaves the masters unchanged.

        The first mini-batch takes its old log-probs from its own forward, because nothing has moved
        before its update. Those of the other mini-batches are computed in advance. They are not
        computed at all if nothing uses them (`needs_old`), except in steps that measure lost
        updates. Before a gate, and under `ratio_fix: shadow_forward`, all are computed in advance.

        Args:
            step: training step, from 0. It decides the learning rate, the shuffle, and whether lost
                updates and flipped codes are measured.
            gate: called before anything is updated, with the batch's mismatch and a function that
                measures how far two correct implementations differ on the batch. It may raise.
            log: log that is filled in for this batch. Pass it on every rank or on none
                (collective).
        """
        lr = self.schedule.rate(step)
        self.optimizer.lr = lr
        self.stopwatch.take()
        require_finite_sampler(batch, self.model.context.dtype)
        shuffled = mini_batches(batch, self.config.mini_batches, step_seed(self._seed, step))
        trained = [index for index in shuffled if batch.advantages[index].any()]
        learning = Learning(
            batch=batch,
            step=step,
            trained=trained,
            config=self.config,
            model=self.model,
            processes=self.processes,
            stopwatch=self.stopwatch,
            old=RowLogprobs(batch),
            log=log,
            start=self._starting_policy,
            reference=None if self._reference is None else RowLogprobs(batch),
            fill_logprobs=self.scorer.fill,
        )
        observers = [observer(learning) for observer in OBSERVERS]
        for observer in observers:
            observer.before_batch()
        old = learning.old
        with self.stopwatch("old"):
            self.scorer.fill_for_ratio(old, self._rows_in_advance(learning, gate is not None))
        if gate is not None:
            gate(old.mismatch(), lambda: self._rounding_floor(old))
        if self._reference is not None and learning.reference is not None:
            self.scorer.fill_for_ratio(
                learning.reference, torch.arange(len(batch.tokens)), self._reference
            )
        self.batch_complete = False
        updates = [self._update(learning, observers, number) for number in range(len(trained))]
        self.batch_complete = True
        records: dict[str, Any] = {}
        for observer in observers:
            records |= observer.record()
        return batch_stats(updates, old, lr, self.loss_scale.scale, self.stopwatch.take(), records)

    def _rounding_floor(self, old: RowLogprobs) -> Mismatch:
        """Return the mismatch of log-probs with other roundings to `old`, over its known rows."""
        rows = old.known.nonzero().flatten()
        rerounded = RowLogprobs(old.batch)
        with self.model.context.other_roundings(self._seed):
            self.scorer.fill_for_ratio(rerounded, rows)
        mask = old.batch.response_mask[rows]
        return measure_mismatch(rerounded.values[rows], old.values[rows], mask)

    def _rows_in_advance(self, learning: Learning, gated: bool) -> torch.Tensor:
        """Return the rows whose old log-probs are computed before any update, int64 [n].

        gated: whether a gate checks the batch, for which all rows are computed.
        """
        all_rows = torch.arange(len(learning.batch.tokens))
        if gated or not learning.trained or self.config.ratio_fix == "shadow_forward":
            return all_rows
        if not (needs_old(self.config) or is_due(self.config.diagnostics_every, learning.step)):
            return all_rows[:0]
        # The first mini-batch's own forward gives its old log-probs.
        return all_rows[~torch.isin(all_rows, learning.trained[0])]

    def _update(self, learning: Learning, observers: list[Observer], number: int) -> Update:
        """Take the update of that number, from 0."""
        index = learning.trained[number]
        for observer in observers:
            observer.before_update(number, index)
        self.model.gradients.scale_by(self.loss_scale.scale)
        mini = self._mini_batch(learning, number)
        micro_batches = list(self.scorer.micro_batches(learning.batch, index))
        partial_sums: list[dict[str, torch.Tensor | None]] = []
        for micro in micro_batches:
            is_last = micro is micro_batches[-1]
            observed, sums = self._micro_batch(learning, mini, micro, is_last)
            if not micro.is_dummy:
                partial_sums.append(sums)
                for observer in observers:
                    observer.micro_batch(observed)
        if mini.supplies_old:
            self.scorer.all_reduce(learning.old, index, self.model)
        norm, taken = self._apply(learning, observers, number)
        metrics = sum(map(LossMetrics.of, partial_sums), LossMetrics())
        return Update(metrics.total(self.processes), norm, taken)

    def _mini_batch(self, learning: Learning, number: int) -> _MiniBatch:
        """Return what the micro-batches of the update of that number share."""
        index = learning.trained[number]
        old_known = bool(learning.old.known[index].all())
        shadow = None
        if self.config.ratio_fix == "shadow_forward":
            shadow = RowLogprobs(learning.batch)
            self.scorer.fill_for_ratio(shadow, index)
        return _MiniBatch(
            number=number,
            size=BatchSize(len(index), int(learning.batch.response_mask[index].sum())),
            old_known=old_known,
            supplies_old=number == 0 and not old_known,
            shadow=shadow,
        )

    def _micro_batch(
        self, learning: Learning, mini: _MiniBatch, micro: RankMicroBatch, is_last: bool
    ) -> tuple[MicroBatch, dict[str, torch.Tensor | None]]:
        """Run forward and backward of one micro-batch, and return it with its metrics.

        is_last: whether it is the mini-batch's last one.
        """
        shadow = mini.shadow
        rows = learning.batch.rows(micro.index).to(self.model.device)
        with self.stopwatch("forward"):
            own, entropies = self.scorer.token_logprobs(
                self.model, rows, micro.chunks, entropy=mini.supplies_old
            )
        # `own` are this forward's log-probs. The loss compares `current`, which under
        # `ratio_fix: shadow_forward` has the values of the published codes and own's gradient.
        current = own if shadow is None else shadowed(own, shadow.rows_like(micro.index, own))
        old = None
        if mini.supplies_old:
            old = current.detach()
        elif mini.old_known:
            old = learning.old.rows_like(micro.index, current)
        share = self._loss(learning, micro, rows, current, old, mini.size)
        if is_last and self.config.gradient_checkpointing is not True:
            # No forward needs this version's kernels again: the step makes the next version.
            self.model.release_kernels()
        with self.stopwatch("backward"):
            # A dummy micro-batch runs its backward for the collectives, and adds nothing.
            scale = 0.0 if micro.is_dummy else self.loss_scale.scale
            self.optimizer.backward(share.loss * scale, is_last)
        if mini.supplies_old and not micro.is_dummy:
            learning.old.write(micro.index, own.detach(), entropies)
        observed = MicroBatch(
            update=mini.number,
            index=micro.index,
            rows=rows,
            current=own,
            entropies=entropies,
            tokens=share.tokens,
        )
        return observed, share.numbers

    def _loss(
        self,
        learning: Learning,
        micro: RankMicroBatch,
        rows: Batch,
        current: torch.Tensor,
        old: torch.Tensor | None,
        size: BatchSize,
    ) -> LossShare:
        """Return a micro-batch's share of the loss, with the routers' auxiliary loss if it is on.

        old: log-probs by the learner before the batch, fp32 [n, t]; None if they are unknown.
        """
        reference = None
        if learning.reference is not None:
            reference = learning.reference.rows_like(micro.index, current)
        terms = LossInput(
            current=current,
            old=old,
            sampler=rows.sampler_logprobs,
            reference=reference,
            response_mask=rows.response_mask,
            advantages=rows.advantages,
        )
        with self.stopwatch("forward"):
            share = policy_loss(terms, learning.config, size)
            if not self.model.router_log.enabled:
                return share
            auxiliary = load_balance_loss(self.model, rows.real(), self.scorer.packed_rows(rows))
            balance = auxiliary * (len(micro.index) / size.sequences)
            loss = share.loss + self._balance * balance
            metrics = {"loss": loss.detach(), "load_balance": balance.detach()}
            return replace(share, loss=loss, numbers=share.numbers | metrics)

    def _apply(
        self, learning: Learning, observers: list[Observer], number: int
    ) -> tuple[float, bool]:
        """Clip, step, and materialize the next weight version.

        Returns the gradient norm before clipping (0 if no step was taken) and whether a step was
        taken.
        """
        diagnose = any(observer.counts_changes for observer in observers)
        with self.stopwatch("optimizer"):
            step = self.optimizer.step(diagnose)
        if step.taken:
            with self.stopwatch("materialize"):
                self.model.refresh(learning.flips if diagnose else None)
        self.loss_scale.update(step.taken)
        for observer in observers:
            observer.after_update(number, step.diagnostics)
        return (step.norm if step.taken else 0.0), step.taken

    def state_dict(self) -> dict[str, Any]:
        """Return masters, optimizer, loss scale, kept scales and the starting policy's sample.

        With LoRA the masters are the adapters alone, and the digest of their base is included. With
        several processes masters and moments are shared as the learner's own are.
        """
        return {
            **self.optimizer.state_dict(),
            "scale": self.loss_scale.state_dict(),
            "base": self.model.base_digest,
            "scales": scales_state(self.model),
            "start": self._starting_policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` and materialize its weights. Its moments are used, not copied.

        Raises `ConfigError` if it belongs to another base, or if its kept scales are of other
        layers.
        """
        self._require_base(state["base"])
        load_scales_state(self.model, state["scales"])
        self.optimizer.load_state_dict(state)
        self.loss_scale.load_state_dict(state["scale"])
        self._starting_policy.load_state_dict(state["start"])
        self.model.refresh()

    def _require_base(self, saved: str | None) -> None:
        """Raise `ConfigError` if the digest `saved` of adapters' base is not this model's."""
        ours = self.model.base_digest
        if saved != ours:
            digests = [
                f"digest {digest[:16]}…" if digest else "no frozen base" for digest in (saved, ours)
            ]
            raise ConfigError(
                f"the checkpoint's LoRA adapters are for a base with {digests[0]}, this policy has"
                f" {digests[1]}; give the model folder the run was started with, unchanged"
            )
