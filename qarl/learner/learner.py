"""One batch of groups → stepped masters: old log-probs, mini-batches, straight-through gradients,
optimizer.

Axes: B sequences, T tokens.
"""

from collections.abc import Callable
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
from qarl.learner.optim.sharded import ShardedOptimizer
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs
from qarl.learner.scorer import Part, Scorer
from qarl.learner.stopwatch import Stopwatch
from qarl.quant.model.kept_scales import load_scales_state, scales_state
from qarl.quant.model.low_bit_model import LowBitModel

FirstBatchGate = Callable[[Mismatch, Callable[[], Mismatch]], None]
"""Given the first batch's mismatch, and what measures the floor of one on the same batch."""


class Learner:
    """Owns the policy's masters and their optimizer.

    processes: those that learn together. All are given the same batch, and each computes its share
    of it. reference: the policy a KL penalty measures from, never stepped; needed exactly where
    `config.kl` asks for one, else `ConfigError`. seed: the run's, which shuffles. steps: of the
    training, where the learning rate decays at its end. temperature: that completions are sampled
    at; all log-probs are of the policy at it. whole: whether the masters are those of a finished
    batch, and no error came between its updates.
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
        self.sharded = ShardedOptimizer(model, config, self.processes)
        self.loss_scale = LossScale(model.context.compute_dtype == torch.float16)
        self._balance = load_balance_coefficient(model, config.router_aux_loss)
        model.router_log.enable(self._balance > 0)
        self._reference = reference
        self.scorer = Scorer(model, config, self.processes, temperature)
        configure_backward(model, config)
        self.stopwatch = Stopwatch()
        self.schedule = make_schedule(config.optimizer, steps)
        self._seed = seed
        self._start = StartingPolicy()
        self.whole = True

    def learn(
        self,
        batch: Batch,
        step: int,
        gate: FirstBatchGate | None = None,
        log: TokenLog | None = None,
    ) -> LearnStats:
        """Step over the batch in shuffled mini-batches, materializing a weight version after each.

        step: of the training, from 0; it decides the learning rate, the shuffle, and whether lost
        updates and flipped codes are measured. gate: called before anything is updated, with the
        batch's mismatch and what measures how far two right implementations are apart on it; it may
        raise. A mini-batch with a non-finite gradient is skipped and counted; masters then stay as
        they were. log: filled in for this batch. Pass it on every rank or on none (collective).

        The old log-probs of the first mini-batch are those of its own forward, before whose update
        nothing has moved; the others' are computed beforehand, and not at all where nothing is made
        of them (`needs_old`), but for steps that measure lost updates.
        """
        lr = self.schedule.rate(step)
        self.sharded.optimizer.lr = lr
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
            start=self._start,
            reference=None if self._reference is None else RowLogprobs(batch),
            add_logprobs=self.scorer.add,
        )
        watching = [observer(learning) for observer in OBSERVERS]
        for observer in watching:
            observer.before_batch()
        old = learning.old
        with self.stopwatch("old"):
            self.scorer.add_ratio_side(old, self._beforehand(learning, gate is not None))
        if gate is not None:
            gate(old.mismatch(), lambda: self._rounding_floor(old))
        if self._reference is not None and learning.reference is not None:
            self.scorer.add_ratio_side(
                learning.reference, torch.arange(len(batch.tokens)), self._reference
            )
        self.whole = False
        updates = [self._update(learning, watching, number) for number in range(len(trained))]
        self.whole = True
        records = {
            name: value for observer in watching for name, value in observer.record().items()
        }
        return batch_stats(updates, old, lr, self.loss_scale.scale, self.stopwatch.take(), records)

    def _rounding_floor(self, old: RowLogprobs) -> Mismatch:
        """Return how far log-probs with other roundings are from `old`'s, over the rows that it
        knows.
        """
        rows, moved = old.known.nonzero().flatten(), RowLogprobs(old.batch)
        with self.model.context.other_roundings(self._seed):
            self.scorer.add_ratio_side(moved, rows)
        return measure_mismatch(moved.values[rows], old.values[rows], old.batch.response_mask[rows])

    def _beforehand(self, learning: Learning, all_of_them: bool) -> torch.Tensor:
        """The rows whose old log-probs are computed before anything is updated, int64 [n]."""
        rows = torch.ones(len(learning.batch.tokens), dtype=torch.bool)
        if not all_of_them and learning.trained and self.config.ratio_fix != "shadow_forward":
            rows[:] = needs_old(self.config) or is_due(self.config.diagnostics_every, learning.step)
            rows[learning.trained[0]] = False
        return rows.nonzero().flatten()

    def _update(self, learning: Learning, watching: list[Observer], number: int) -> Update:
        """The update of that number, from 0. Before the first one none was taken since the batch
        was sampled, so that what its forward gives is old.
        """
        batch, old, index = learning.batch, learning.old, learning.trained[number]
        for observer in watching:
            observer.before_update(number, index)
        self.model.gradients.scale_by(self.loss_scale.scale)
        size = BatchSize(len(index), int(batch.response_mask[index].sum()))
        have_old = bool(old.known[index].all())
        is_first = number == 0 and not have_old
        shadow = None
        if self.config.ratio_fix == "shadow_forward":
            shadow = RowLogprobs(batch)
            self.scorer.add_ratio_side(shadow, index)
        numbers: list[dict[str, torch.Tensor | None]] = []
        parts = list(self.scorer.share(batch, index))
        for part in parts:
            rows = batch.rows(part.index).to(self.model.device)
            with self.stopwatch("forward"):
                own, entropies = self.scorer.token_logprobs(
                    self.model, rows, part.chunks, entropy=is_first
                )
            current = own if shadow is None else shadowed(own, shadow.rows_like(own, part.index))
            denominator = (
                current.detach()
                if is_first
                else old.rows_like(current, part.index)
                if have_old
                else None
            )
            share, loss, balance = self._loss(learning, part, rows, current, denominator, size)
            if part is parts[-1] and self.config.gradient_checkpointing is not True:
                # the step makes another version, when all gradients are there
                self.model.release_products()
            with self.stopwatch("backward"):
                (loss * (self.loss_scale.scale if part.counts else 0.0)).backward()
            if is_first and part.counts:
                old.add(part.index, own.detach(), entropies)
            if part.counts:
                numbers.append({**share.numbers, "loss": loss.detach(), **balance})
                micro = MicroBatch(
                    number,
                    part.index,
                    rows=rows,
                    current=own,
                    entropies=entropies,
                    tokens=share.tokens,
                )
                for observer in watching:
                    observer.micro_batch(micro)
        if is_first:
            self.scorer.complete(old, self.model, index)
        norm, taken = self._apply(watching, number)
        metrics = sum(map(LossMetrics.of, numbers), LossMetrics())
        return Update(metrics.total(self.processes), norm, taken)

    def _loss(
        self,
        learning: Learning,
        part: Part,
        rows: Batch,
        current: torch.Tensor,
        old: torch.Tensor | None,
        size: BatchSize,
    ) -> tuple[LossShare, torch.Tensor, dict[str, torch.Tensor]]:
        """A micro-batch's part of the loss; that with the routers' auxiliary loss, if on; and the
        metric of this.
        """
        terms = LossInput(
            current=current,
            old=old,
            sampler=rows.sampler_logprobs,
            reference=learning.reference and learning.reference.rows_like(current, part.index),
            response_mask=rows.response_mask,
            advantages=rows.advantages,
        )
        with self.stopwatch("forward"):
            share = policy_loss(terms, learning.config, size)
            if not self.model.router_log.enabled:
                return share, share.loss, {}
            of_rows = load_balance_loss(self.model, rows.real(), self.scorer.packed_rows(rows))
            balance = of_rows * (len(part.index) / size.sequences)
            return (
                share,
                share.loss + self._balance * balance,
                {"load_balance": balance.detach()},
            )

    def _apply(self, watching: list[Observer], number: int) -> tuple[float, bool]:
        """Clip, step, refresh. Returns the gradient norm before clipping and whether a step was
        taken.
        """
        with self.stopwatch("optimizer"):
            step = self.sharded.step(any(observer.counts_arrivals for observer in watching))
        if step.taken:
            with self.stopwatch("materialize"):
                self.model.refresh(next((o.flips for o in watching if o.flips is not None), None))
        self.loss_scale.update(step.taken)
        for observer in watching:
            observer.after_update(number, step.arrived)
        return (step.norm if step.taken else 0.0), step.taken

    def state_dict(self) -> dict[str, Any]:
        """Masters, optimizer, loss scale, kept scales and the start's sample; of LoRA the adapters
        alone, and the digest of the base they are for. Of several processes each has a part of the
        masters and of the optimizer, to be put together for `load_state_dict`.
        """
        return {
            **self.sharded.state_dict(),
            "scale": self.loss_scale.state_dict(),
            "base": self.model.base_digest,
            "scales": scales_state(self.model),
            "start": self._start.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`, materialized. Raises `ConfigError` for another base, or kept
        scales of others.
        """
        self._require_base(state["base"])
        load_scales_state(self.model, state["scales"])
        self.sharded.load_state_dict(state)
        self.loss_scale.load_state_dict(state["scale"])
        self._start.load_state_dict(state["start"])
        self.model.refresh()

    def _require_base(self, saved: str | None) -> None:
        ours = self.model.base_digest
        if saved != ours:
            digests = [
                f"digest {digest[:16]}…" if digest else "no frozen base" for digest in (saved, ours)
            ]
            raise ConfigError(
                f"the checkpoint's LoRA adapters are for a base with {digests[0]}, this policy has"
                f" {digests[1]}; give the model folder the run was started with, unchanged"
            )
