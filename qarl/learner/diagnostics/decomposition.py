"""Why learner and sampler give one token different log-probs: the log-ratio at the weights being
stepped, in parts.

    log π_learner(W_k) - log π_sampler(W_j) =
        dtype      the learner's own forward      - the same in the engine's compute dtype
      + scheme     masters in the engine's dtype  - the codes made of them, multiplied by the
      learner + staleness  the codes of W_k               - the codes of W_j, which sampled + kernel
      the codes of W_j, multiplied by the learner - by the engine

W_j are the weights before the batch's updates, W_k those before its last one. The forwards that a
step does without (shadow forwards) are done for a sample of the last mini-batch, and every so many
steps (`learner.diagnostics_every`). An aligned learner multiplies the codes itself: dtype and
scheme are 0, and it needs one shadow forward, after the step. Where a version was published since
the sample was drawn (`rollout.max_staleness`), the weights that drew it are gone: staleness is then
the codes of W_k against the engine, and kernel, which is a part of that, not known.

Source: "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026; sections 5,
6 and 10.3), whose α is staleness + kernel and whose β is scheme + dtype. Axes: B sequences, T
tokens, of which T-1 are predicted; n response tokens of the sample.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import ratio_from
from qarl.learner.batching import Batch
from qarl.learner.diagnostics.base import Learning, MicroBatch, Observer, is_due
from qarl.learner.diagnostics.figure import Figure
from qarl.learner.objectives import ObjectiveInput, find_objective
from qarl.learner.optim.optimizer import UpdateDiagnostics
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.layers.context import Forward

SAMPLE_TOKENS = 2048
"""Prompts and responses of the sample, at most; one sequence at least."""


@dataclass(frozen=True)
class Decomposition:
    """Of the sample's response tokens; None where nothing was measured.

    dtype, scheme, staleness, kernel: mean |part|, nats; kernel None where the weights that sampled
    are gone. alpha: mean |staleness + kernel|, what a ratio of two low-bit policies would be; beta:
    mean |dtype + scheme|, the gap in precision at W_k. signal_to_noise: alpha over beta, None where
    that is 0. phantom_clipped: share of tokens that the objective clips and would not clip if the
    ratio were exp(α): the study's definition, at W_k, for any denominator. deployed_improvement:
    mean of Δ · sign(A), nats, over tokens with an advantage A; Δ is what the last update changed of
    log π of the published codes. deployed_efficiency: that over mean |Δ|: 1 where every token of
    the low-bit policy moves as its advantage asks, near 0 where they move at random.
    """

    dtype: float | None = None
    scheme: float | None = None
    staleness: float | None = None
    kernel: float | None = None
    alpha: float | None = None
    beta: float | None = None
    signal_to_noise: float | None = None
    phantom_clipped: float | None = None
    deployed_improvement: float | None = None
    deployed_efficiency: float | None = None


@dataclass(frozen=True)
class Forwards:
    """Log-probs of the same tokens, fp32 [B, T-1]. own: the learner's forward, by W_k; cast:
    unquantized, in the engine's dtype, by W_k; published: the codes of W_k; before: those of the
    weights that sampled, None where they are gone; after: those the update made; sampler: the
    engine's.
    """

    own: torch.Tensor
    cast: torch.Tensor
    published: torch.Tensor
    before: torch.Tensor | None
    after: torch.Tensor
    sampler: torch.Tensor

    def parts(self) -> dict[str, torch.Tensor]:
        """The log-ratio's parts, fp32 [B, T-1] each; they add up to own - sampler."""
        precision = {
            "dtype": self.own - self.cast,
            "scheme": self.cast - self.published,
        }
        if self.before is None:
            return precision | {"staleness": self.published - self.sampler}
        return precision | {
            "staleness": self.published - self.before,
            "kernel": self.before - self.sampler,
        }


def decompose(
    forwards: Forwards, old: torch.Tensor, batch: Batch, config: LearnerConfig
) -> Decomposition:
    """old: the ratio's denominator where that is the learner's, fp32 [B, T-1]. batch: the same
    sequences.
    """
    mask = batch.response_mask
    used = forwards.published if config.ratio_fix == "shadow_forward" else forwards.own
    proximal = forwards.sampler if ratio_from(config.correction) == "sampler" else old
    clipped = clipped_tokens(used, proximal, batch, config)
    phantom = clipped & ~clipped_tokens(forwards.published, forwards.sampler, batch, config)
    parts = forwards.parts()
    alpha = parts["staleness"] + parts["kernel"] if "kernel" in parts else parts["staleness"]
    beta = parts["dtype"] + parts["scheme"]
    means = {
        name: float(part[mask].abs().mean())
        for name, part in (parts | {"alpha": alpha, "beta": beta}).items()
    }
    taught = mask & (batch.advantages != 0)
    moved = (forwards.after - forwards.published)[taught]
    size = float(moved.abs().mean()) if len(moved) else 0.0
    improvement = float((moved * batch.advantages[taught].sign()).mean()) if len(moved) else None
    return Decomposition(
        **means,
        signal_to_noise=means["alpha"] / means["beta"] if means["beta"] else None,
        phantom_clipped=float(phantom.expand(mask.shape)[mask].float().mean()),
        deployed_improvement=improvement,
        deployed_efficiency=improvement / size if improvement is not None and size else None,
    )


def clipped_tokens(
    current: torch.Tensor, proximal: torch.Tensor, batch: Batch, config: LearnerConfig
) -> torch.Tensor:
    """What the configured objective clips, bool [B, T-1] or [B, 1]. current, proximal: log-probs,
    fp32 [B, T-1].
    """
    inputs = ObjectiveInput(
        current=current,
        proximal=proximal,
        weight=torch.ones_like(current[:, :1]),
        response_mask=batch.response_mask,
        advantages=batch.advantages,
    )
    return find_objective(config.objective)(inputs, config.objective).clipped


class ShadowForwards(Observer):
    """Of a sample of the last mini-batch, in the steps that diagnose."""

    figures = (
        Figure(
            id="parts",
            title="Where the log-ratio comes from",
            unit="nats a token",
            help="Mean |part| of log π_learner − log π_sampler at the weights stepped last.",
            lines={
                name: f"learn/log_ratio/{name}"
                for name in ("dtype", "scheme", "staleness", "kernel")
            },
            logarithmic=True,
        ),
    )

    def __init__(self, learning: Learning):
        super().__init__(learning)
        self._due = bool(learning.trained) and is_due(
            learning.config.diagnostics_every, learning.step
        )
        self._model = learning.model
        self._values: dict[str, torch.Tensor] = {}
        self._own = RowLogprobs(learning.batch)
        self._behind = False
        if self._due:
            self.sample = sample_rows(learning.batch, learning.trained[-1])
            behind = learning.batch.versions_behind
            self._behind = behind is not None and bool(behind[self.sample].any())

    def before_batch(self) -> None:
        """By the codes that sampled, where they are still there; an aligned learner's old log-probs
        are these. The rows that the log wants so are scored by unquantized weights, which an
        unaligned learner does anyway.
        """
        if not self._due:
            return
        log = self.learning.log
        with self.learning.stopwatch("shadow"):
            if not self._model.context.aligned:
                if not self._behind:
                    self._values["before"] = self._logprobs(Forward.PUBLISHED)
            elif log is not None and len(log.shown):
                with self._model.forward_as(Forward.UNQUANTIZED):
                    rows = sample_rows(self.learning.batch, log.shown)
                    self.learning.add_logprobs(log.unquantized, self._model, rows)

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """By the weights that are stepped last."""
        context = self._model.context
        if not self._due or not self.learning.is_last(update) or context.aligned:
            return
        with self.learning.stopwatch("shadow"):
            self._values["published"] = self._logprobs(Forward.PUBLISHED)
            if context.compute_dtype != context.dtype:
                self._values["cast"] = self._logprobs(Forward.UNQUANTIZED)

    def micro_batch(self, micro: MicroBatch) -> None:
        """The learner's own forward of the last update."""
        if self._due and self.learning.is_last(micro.update):
            self._own.add(micro.index, micro.current.detach(), micro.entropies)

    def after_update(self, update: int, arrived: UpdateDiagnostics | None) -> None:
        """By the codes that are published next."""
        if self._due and self.learning.is_last(update):
            with self.learning.stopwatch("shadow"):
                self._own.complete(self.sample, self.learning.processes)
                self._values["after"] = self._logprobs(Forward.PUBLISHED)

    def record(self) -> dict[str, Any]:
        """`log_ratio`."""
        if not self._due:
            return {"log_ratio": Decomposition()}
        batch, config = self.learning.batch, self.learning.config
        rows, own, old = (
            batch.rows(self.sample),
            self._own.values[self.sample],
            self.learning.old.values[self.sample],
        )
        values = {
            "own": own,
            "cast": own,
            "published": own,
            "before": old,
            **self._values,
        }
        length = rows.response_mask.shape[1]
        forwards = Forwards(
            **{name: v[:, :length] for name, v in values.items()},
            sampler=rows.sampler_logprobs,
        )
        forwards = replace(forwards, before=None) if self._behind else forwards
        return {"log_ratio": decompose(forwards, old[:, :length], rows, config)}

    def _logprobs(self, forward: Forward) -> torch.Tensor:
        return self.learning.logprobs(self.learning.batch, self.sample, forward)


def sample_rows(batch: Batch, rows: torch.Tensor, tokens: int = SAMPLE_TOKENS) -> torch.Tensor:
    """As many of the rows, int64 [n], from the first on, as have that many tokens together; one at
    least.
    """
    return rows[: max(1, int((batch.length[rows].cumsum(0) <= tokens).sum()))]
