"""What the gap in precision does to the gradient: backwards over one sample that differ in ratio and score alone.

g = -1/N Σ_t A_t · r_t · ∇log π(t) over the sample's N response tokens, r_t as a number, by the weights that the batch's
last update moves:

    pass      r_t                     ∇log π of
    clean     exp(α)                  the published codes
    score     exp(α)                  the learner's own forward
    ratio     exp(α + β)              the published codes
    actual    exp(α + β)              the learner's own forward
    clipped   exp(α + β), or 0 where  the learner's own forward
              the objective clips

α = log π_codes - log π_sampler and β = log π_learner - log π_codes, as in `diagnostics.decomposition`. An aligned
learner multiplies the codes: β is 0, and all passes but the last are one.

Source: "Defeating the trainer-generator precision mismatch in TRL" (Hugging Face, 2026; sections 7.3 to 7.5, whose
passes A, B, C and D these are, and 8.4).
Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import ratio_from
from qarl.learner.diagnostics.base import Learning, Observer, is_due
from qarl.learner.diagnostics.decomposition import clipped_tokens, sample_rows
from qarl.learner.row_logprobs import RowLogprobs

Gradient = dict[str, torch.Tensor]
_CHUNK = 1 << 22


@dataclass(frozen=True)
class GradientErrors:
    """Of gradients over all masters; L2 norms are over that of the clean one. None where nothing was measured; cosines
    also where either is 0.

    ratio_error, score_error: of ratio - clean and score - clean. interaction: of what they leave of actual - clean.
    clean_ratio, clean_score, ratio_score: cosines of clean with these two errors, and of the two. actual_cosine,
    clipped_cosine: of clean with the actual and the clipped gradient. clipped_error: of clipped - clean.
    """

    ratio_error: float | None = None
    score_error: float | None = None
    interaction: float | None = None
    clean_ratio: float | None = None
    clean_score: float | None = None
    ratio_score: float | None = None
    actual_cosine: float | None = None
    clipped_cosine: float | None = None
    clipped_error: float | None = None


class GradientPasses(Observer):
    """Over a sample of the last mini-batch, as one micro-batch, before it is learned from. The masters have no gradient
    before nor after. Clean, score and ratio are on the host, each as large as the fp32 masters."""

    def __init__(self, learning: Learning):
        super().__init__(learning)
        self._model, self._backward = learning.model, learning.backward
        self._errors = GradientErrors()

    def before_update(self, update: int, index: torch.Tensor) -> None:
        """Measure, before the last one where it is due."""
        learning = self.learning
        if learning.is_last(update) and is_due(learning.config.gradient_passes_every, learning.step):
            self._index = sample_rows(learning.batch, index)
            self._rows = learning.batch.rows(self._index).to(self._model.device)
            with learning.stopwatch("shadow"):
                self._errors = self._measured(learning.old if update else None, learning.config)

    def record(self) -> dict[str, Any]:
        """`gradients`."""
        return {"gradients": self._errors}

    def _logprobs(self) -> torch.Tensor:
        return self.learning.logprobs(self._rows)

    def _measured(self, old: RowLogprobs | None, config: LearnerConfig) -> GradientErrors:
        """old: the ratio's denominator where that is the learner's; None where no update was taken since the batch was
        sampled: the present log-probs are it."""
        rows = self._rows
        with torch.no_grad():
            own = self._logprobs()
            with self._model.published_forward():
                codes = self._logprobs()
        used = codes if config.ratio_fix == "shadow_forward" else own
        proximal = used if old is None else old.rows_like(used, self._index)
        proximal = rows.sampler_logprobs if ratio_from(config.correction) == "sampler" else proximal
        kept = ~clipped_tokens(used, proximal, rows, config).expand(rows.response_mask.shape)
        aligned, actual = (values - rows.sampler_logprobs for values in (codes, own))
        clean = self._gradient(aligned.exp(), published=True)
        score = _minus(self._gradient(aligned.exp(), published=False), clean)
        ratio = _minus(self._gradient(actual.exp(), published=True), clean)
        whole = self._gradient(actual.exp(), published=False)
        size = _norm(clean)
        actual_cosine = _cosine(clean, whole)
        interaction = _norm(_minus(_minus(_minus(whole, clean), score), ratio))
        clipped = self._gradient(actual.exp() * kept, published=False)
        clipped_cosine = _cosine(clean, clipped)
        return GradientErrors(
            ratio_error=_norm(ratio) / size if size else None,
            score_error=_norm(score) / size if size else None,
            interaction=interaction / size if size else None,
            clean_ratio=_cosine(clean, ratio),
            clean_score=_cosine(clean, score),
            ratio_score=_cosine(ratio, score),
            actual_cosine=actual_cosine,
            clipped_cosine=clipped_cosine,
            clipped_error=_norm(_minus(clipped, clean)) / size if size else None,
        )

    def _gradient(self, ratio: torch.Tensor, published: bool) -> Gradient:
        """Of all masters, fp32, on the host. ratio: fp32 [B, T-1]. published: by the codes, or as the learner does."""
        mask = self._rows.response_mask
        weights = self._rows.advantages * ratio * mask / mask.sum()
        with self._model.published_forward() if published else contextlib.nullcontext():
            self._backward(-(weights * self._logprobs()).sum())
        gradients = {}
        for name, master in self._model.masters.items():
            if master.grad is not None:
                gradients[name] = master.grad.detach().to("cpu", torch.float32, copy=True)
                master.grad = None
        return gradients


def _minus(first: Gradient, second: Gradient) -> Gradient:
    """first, overwritten by the difference."""
    for name, gradient in first.items():
        gradient -= second[name]
    return first


def _product(first: Gradient, second: Gradient) -> float:
    """Inner product, summed in fp64."""
    total = 0.0
    for name, gradient in first.items():
        parts = zip(gradient.flatten().split(_CHUNK), second[name].flatten().split(_CHUNK), strict=True)
        total += sum(float(one.double() @ two.double()) for one, two in parts)
    return total


def _norm(gradient: Gradient) -> float:
    return _product(gradient, gradient) ** 0.5


def _cosine(first: Gradient, second: Gradient) -> float | None:
    sizes = _norm(first) * _norm(second)
    return _product(first, second) / sizes if sizes else None
