"""Why learner and sampler give one token different log-probs: the log-ratio at the weights being stepped, in parts.

    log π_learner(W_k) - log π_sampler(W_j) =
        dtype      the learner's own forward      - the same in the engine's compute dtype
      + scheme     masters in the engine's dtype  - the codes made of them, multiplied by the learner
      + staleness  the codes of W_k               - the codes of W_j, which sampled
      + kernel     the codes of W_j, multiplied by the learner - by the engine

W_j are the weights before the batch's updates, W_k those before its last one. The forwards that a step does without
(shadow forwards) are done for a sample of the last mini-batch, and every so many steps (`learner.diagnostics_every`).
An aligned learner multiplies the codes itself: dtype and scheme are 0, and it needs one shadow forward, after the step.
Where a version was published since the sample was drawn (`rollout.max_staleness`), the weights that drew it are gone:
staleness is then the codes of W_k against the engine, and kernel, which is a part of that, not known.

Source: "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026; sections 5, 6 and 10.3), whose
α is staleness + kernel and whose β is scheme + dtype.
Axes: B sequences, T tokens, of which T-1 are predicted; n response tokens of the sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import ratio_from
from qarl.learner.batching import Batch
from qarl.learner.diagnostics.token_log import TokenLog
from qarl.learner.objectives import ObjectiveInput, find_objective
from qarl.learner.processes import Processes
from qarl.learner.row_logprobs import RowLogprobs
from qarl.quant.model.low_bit_model import LowBitModel

SAMPLE_TOKENS = 2048
"""Prompts and responses of the sample, at most; one sequence at least."""


@dataclass(frozen=True)
class Decomposition:
    """Means of |part| over the sample's response tokens, in nats; None where nothing was measured. dtype, scheme,
    staleness, kernel: see above. alpha, beta: of their sums two by two. signal_to_noise: alpha/beta, None where beta
    is 0. phantom_clipped: share of the tokens that the objective clips and would not clip by α alone.

    deployed_improvement: mean of Δ · sign(A) over the tokens with an advantage A, Δ the change of log π of the
    published codes by the update. deployed_efficiency: that over the mean of |Δ|, 1 where every token moves as its
    advantage asks; None where nothing moved.
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
    """Log-probs of the same tokens, fp32 [B, T-1]. own: the learner's forward, by W_k; cast: unquantized, in the
    engine's dtype, by W_k; published: the codes of W_k; before: those of the weights that sampled, None where they are
    gone; after: those the update made; sampler: the engine's."""

    own: torch.Tensor
    cast: torch.Tensor
    published: torch.Tensor
    before: torch.Tensor | None
    after: torch.Tensor
    sampler: torch.Tensor

    def parts(self) -> dict[str, torch.Tensor]:
        """The log-ratio's parts, fp32 [B, T-1] each; they add up to own - sampler."""
        precision = {"dtype": self.own - self.cast, "scheme": self.cast - self.published}
        if self.before is None:
            return precision | {"staleness": self.published - self.sampler}
        return precision | {"staleness": self.published - self.before, "kernel": self.before - self.sampler}


def decompose(forwards: Forwards, old: torch.Tensor, batch: Batch, config: LearnerConfig) -> Decomposition:
    """old: the ratio's denominator where that is the learner's, fp32 [B, T-1]. batch: the same sequences."""
    mask = batch.response_mask
    used = forwards.published if config.ratio_fix == "shadow_forward" else forwards.own
    proximal = forwards.sampler if ratio_from(config.correction) == "sampler" else old
    clipped = clipped_tokens(used, proximal, batch, config)
    phantom = clipped & ~clipped_tokens(forwards.published, forwards.sampler, batch, config)
    parts = forwards.parts()
    alpha = parts["staleness"] + parts["kernel"] if "kernel" in parts else parts["staleness"]
    beta = parts["dtype"] + parts["scheme"]
    means = {name: float(part[mask].abs().mean()) for name, part in (parts | {"alpha": alpha, "beta": beta}).items()}
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


def clipped_tokens(current: torch.Tensor, proximal: torch.Tensor, batch: Batch, config: LearnerConfig) -> torch.Tensor:
    """What the configured objective clips, bool [B, T-1] or [B, 1]. current, proximal: log-probs, fp32 [B, T-1]."""
    given = ObjectiveInput(
        current=current,
        proximal=proximal,
        weight=torch.ones_like(current[:, :1]),
        response_mask=batch.response_mask,
        advantages=batch.advantages,
    )
    return find_objective(config.objective)(given, config.objective).clipped


class ShadowForwards:
    """Of one batch, in the order of its methods. rows: the last mini-batch's, int64 [m], of which a sample is taken.
    add_logprobs: computes a model's log-probs of the rows at an index, by all processes together. own: filled in by the
    last update's forward."""

    def __init__(
        self,
        batch: Batch,
        rows: torch.Tensor,
        model: LowBitModel,
        add_logprobs: Callable[[RowLogprobs, LowBitModel, torch.Tensor], None],
    ):
        self.batch = batch
        self.sample = sample_rows(batch, rows)
        behind = batch.versions_behind
        self._behind = behind is not None and bool(behind[self.sample].any())
        self._model = model
        self._add_logprobs = add_logprobs
        self._values: dict[str, torch.Tensor] = {}
        self.own = RowLogprobs(batch)

    def before_updates(self, log: TokenLog | None) -> None:
        """By the codes that sampled, where they are still there; an aligned learner's old log-probs are these. The
        rows that `log` wants so are scored by unquantized weights, which an unaligned learner does anyway."""
        if not self._model.context.aligned:
            if not self._behind:
                self._values["before"] = self._published()
        elif log is not None and len(log.shown):
            with self._model.unquantized_forward():
                self._add_logprobs(log.unquantized, self._model, sample_rows(self.batch, log.shown))

    def before_last_update(self) -> None:
        """By the weights that are stepped last."""
        context = self._model.context
        if context.aligned:
            return
        self._values["published"] = self._published()
        if context.compute_dtype != context.dtype:
            with self._model.cast_forward():
                self._values["cast"] = self._computed()

    def after_last_update(self, processes: Processes) -> None:
        """By the codes that are published next. Each process has added its part to `own`."""
        self.own.complete(self.sample, processes)
        self._values["after"] = self._published()

    def decomposition(self, old: torch.Tensor, config: LearnerConfig) -> Decomposition:
        """old: the learner's log-probs before the updates, fp32 [B, T-1], as the ratio has them."""
        rows, own, old = self.batch.rows(self.sample), self.own.values[self.sample], old[self.sample]
        values = {"own": own, "cast": own, "published": own, "before": old, **self._values}
        wide = rows.response_mask.shape[1]
        forwards = Forwards(**{name: v[:, :wide] for name, v in values.items()}, sampler=rows.sampler_logprobs)
        forwards = replace(forwards, before=None) if self._behind else forwards
        return decompose(forwards, old[:, :wide], rows, config)

    def _published(self) -> torch.Tensor:
        with self._model.published_forward():
            return self._computed()

    def _computed(self) -> torch.Tensor:
        found = RowLogprobs(self.batch)
        self._add_logprobs(found, self._model, self.sample)
        return found.values[self.sample]


def sample_rows(batch: Batch, rows: torch.Tensor, tokens: int = SAMPLE_TOKENS) -> torch.Tensor:
    """As many of the rows, int64 [n], from the first on, as have that many tokens together; one at least."""
    return rows[: max(1, int((batch.length[rows].cumsum(0) <= tokens).sum()))]
