"""Decomposition of a token's log-ratio: why learner and sampler give it different log-probs.

At the weights that are being stepped,

    log π_learner(W_k) - log π_sampler(W_j) =
        dtype      the learner's own forward      - the same in the engine's compute dtype
      + scheme     masters in the engine's dtype  - their codes, multiplied by the learner
      + staleness  the codes of W_k               - the codes of W_j, which sampled
      + kernel     the codes of W_j, multiplied by the learner - multiplied by the engine

W_j are the weights before the batch's updates, W_k those before its last one. Some of these
forwards are not part of a step. Such shadow forwards are computed for a sample of the last
mini-batch, every `learner.diagnostics_every` steps. An aligned learner multiplies the codes itself:
dtype and scheme are 0, and it needs a single shadow forward, after the step.

If a version was published since the sample was drawn (`rollout.max_staleness`), the weights that
drew it are gone. Staleness is then the codes of W_k against the engine. This includes the kernel
part, which is unknown.

Source: "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026; sections 5,
6 and 10.3), whose α is staleness + kernel and whose β is scheme + dtype.

Axes: B sequences, T tokens, of which T-1 are predicted; n response tokens of the sample.
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
"""Upper limit of the sample's prompt and response tokens; it has one sequence at least."""


@dataclass(frozen=True)
class Decomposition:
    """Parts of the log-ratio over the sample's response tokens; None if they were not measured."""

    dtype: float | None = None
    """Mean |dtype part|, nats."""
    scheme: float | None = None
    """Mean |scheme part|, nats."""
    staleness: float | None = None
    """Mean |staleness part|, nats."""
    kernel: float | None = None
    """Mean |kernel part|, nats; None if the weights that sampled are gone."""
    alpha: float | None = None
    """Mean |staleness + kernel|, nats: the log-ratio of two low-bit policies."""
    beta: float | None = None
    """Mean |dtype + scheme|, nats: the precision gap at W_k."""
    signal_to_noise: float | None = None
    """alpha / beta; None if beta is 0."""
    phantom_clipped: float | None = None
    """Fraction of the tokens that the objective clips, but would not clip if the ratio were exp(α).
    This is the study's definition, at W_k, for any denominator.
    """
    deployed_improvement: float | None = None
    """Mean of Δ · sign(A) over the tokens with an advantage A, nats. Δ is the last update's
    change of log π of the published codes.
    """
    deployed_efficiency: float | None = None
    """`deployed_improvement` over mean |Δ|: 1 if every token of the low-bit policy moves as its
    advantage asks, near 0 if they move at random.
    """


@dataclass(frozen=True)
class Forwards:
    """Log-probs of the same tokens by several forwards, fp32 [B, T-1]."""

    own: torch.Tensor
    """The learner's forward, with W_k."""
    cast: torch.Tensor
    """Unquantized, in the engine's dtype, with W_k."""
    published: torch.Tensor
    """The codes of W_k."""
    before: torch.Tensor | None
    """The codes of the weights that sampled; None if they are gone."""
    after: torch.Tensor
    """The codes that the last update made."""
    sampler: torch.Tensor
    """The engine's log-probs."""

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts of the log-ratio, fp32 [B, T-1] each; they add up to own - sampler."""
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
    """Return the decomposition of a sample.

    old: the ratio's denominator if that is the learner's, fp32 [B, T-1]. batch: the same sequences.
    """
    mask = batch.response_mask
    used = forwards.published if config.ratio_fix == "shadow_forward" else forwards.own
    proximal = forwards.sampler if ratio_from(config.correction) == "sampler" else old
    clipped = clipped_tokens(used, proximal, batch, config)
    phantom = clipped & ~clipped_tokens(forwards.published, forwards.sampler, batch, config)
    parts = forwards.parts()
    alpha = parts["staleness"] + parts["kernel"] if "kernel" in parts else parts["staleness"]
    beta = parts["dtype"] + parts["scheme"]
    differences = parts | {"alpha": alpha, "beta": beta}
    means = {name: float(part[mask].abs().mean()) for name, part in differences.items()}
    with_advantage = mask & (batch.advantages != 0)
    change = (forwards.after - forwards.published)[with_advantage]
    improvement = efficiency = None
    if len(change):
        signs = batch.advantages[with_advantage].sign()
        improvement = float((change * signs).mean())
        size = float(change.abs().mean())
        efficiency = improvement / size if size else None
    return Decomposition(
        **means,
        signal_to_noise=means["alpha"] / means["beta"] if means["beta"] else None,
        phantom_clipped=float(phantom.expand(mask.shape)[mask].float().mean()),
        deployed_improvement=improvement,
        deployed_efficiency=efficiency,
    )


def clipped_tokens(
    current: torch.Tensor, proximal: torch.Tensor, batch: Batch, config: LearnerConfig
) -> torch.Tensor:
    """Return what the configured objective clips, bool [B, T-1] or [B, 1].

    current, proximal: log-probs, fp32 [B, T-1].
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
    """Observer that decomposes the log-ratio of a sample, in the steps that diagnose.

    The sample is taken from the last mini-batch.
    """

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
        due = is_due(learning.config.diagnostics_every, learning.step)
        self._due = due and bool(learning.trained)
        self._model = learning.model
        self._values: dict[str, torch.Tensor] = {}
        self._own = RowLogprobs(learning.batch)
        """Log-probs by the learner's own forward of the last update."""
        self._behind = False
        """Whether any token of the sample was sampled by an earlier weight version than the
        batch's.
        """
        if self._due:
            self.sample = sample_rows(learning.batch, learning.trained[-1])
            behind = learning.batch.versions_behind
            self._behind = behind is not None and bool(behind[self.sample].any())

    def before_batch(self) -> None:
        """Score the sample with the codes that sampled it, if they still exist.

        An aligned learner already has these log-probs as old log-probs. It scores the rows that the
        token log shows with unquantized weights instead, which an unaligned learner does in any
        case.
        """
        if not self._due:
            return
        log = self.learning.log
        with self.learning.stopwatch("shadow"):
            if self._model.context.aligned:
                if log is not None and len(log.shown):
                    rows = sample_rows(self.learning.batch, log.shown)
                    with self._model.forward_as(Forward.UNQUANTIZED):
                        self.learning.fill_logprobs(log.unquantized, rows, self._model)
            elif not self._behind:
                self._values["before"] = self._logprobs(Forward.PUBLISHED)

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """Score the sample with the weights before the last update."""
        context = self._model.context
        if not self._due or not self.learning.is_last(update) or context.aligned:
            return
        with self.learning.stopwatch("shadow"):
            self._values["published"] = self._logprobs(Forward.PUBLISHED)
            if context.compute_dtype != context.dtype:
                self._values["cast"] = self._logprobs(Forward.UNQUANTIZED)

    def micro_batch(self, micro: MicroBatch) -> None:
        """Collect the log-probs of the learner's own forward of the last update."""
        if self._due and self.learning.is_last(micro.update):
            self._own.write(micro.index, micro.current.detach(), micro.entropies)

    def after_update(self, update: int, diagnostics: UpdateDiagnostics | None) -> None:
        """Score the sample with the codes that are published next."""
        if self._due and self.learning.is_last(update):
            with self.learning.stopwatch("shadow"):
                self._own.all_reduce(self.sample, self.learning.processes)
                self._values["after"] = self._logprobs(Forward.PUBLISHED)

    def record(self) -> dict[str, Any]:
        """Return `log_ratio`."""
        if not self._due:
            return {"log_ratio": Decomposition()}
        rows = self.learning.batch.rows(self.sample)
        own = self._own.values[self.sample]
        old = self.learning.old.values[self.sample]
        # A forward that had no shadow is the learner's own: an aligned learner multiplies codes.
        values = {"own": own, "cast": own, "published": own, "before": old}
        values |= self._values
        length = rows.response_mask.shape[1]
        cut = {name: logprobs[:, :length] for name, logprobs in values.items()}
        forwards = Forwards(**cut, sampler=rows.sampler_logprobs)
        forwards = replace(forwards, before=None) if self._behind else forwards
        return {"log_ratio": decompose(forwards, old[:, :length], rows, self.learning.config)}

    def _logprobs(self, forward: Forward) -> torch.Tensor:
        """Return the sample's log-probs by a forward of that kind, fp32 [m, T-1]."""
        return self.learning.logprobs(self.learning.batch, self.sample, forward)


def sample_rows(batch: Batch, rows: torch.Tensor, tokens: int = SAMPLE_TOKENS) -> torch.Tensor:
    """Return the leading rows whose lengths add up to at most `tokens`, int64 [m].

    There is at least one row. rows: int64 [n].
    """
    total = batch.length[rows].cumsum(0)
    count = int((total <= tokens).sum())
    return rows[: max(1, count)]
