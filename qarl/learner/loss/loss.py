"""A micro-batch's share of the loss: correction, objective, aggregation, KL penalty.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass, replace

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import KlConfig, NoCorrection, ratio_from
from qarl.learner.loss.aggregation import BatchSize, aggregate, mean_over_tokens
from qarl.learner.loss.corrections import correction
from qarl.learner.loss.kl import kl_estimate
from qarl.learner.loss.metrics import LossMetrics
from qarl.learner.loss.tokens import LossTokens, clip_reasons, clipped_sides
from qarl.learner.objectives import ObjectiveInput, ObjectiveResult, find_objective
from qarl.learner.objectives.ratios import sequence_log_ratio


@dataclass(frozen=True)
class LossInput:
    """Log-probs of the same tokens by several policies, with the mask and the advantages."""

    current: torch.Tensor
    """Log-probs by the policy that is being stepped, fp32 [B, T-1], with gradient."""
    old: torch.Tensor | None
    """Log-probs by the learner before the batch, fp32 [B, T-1]; None if they were not computed
    because neither the loss needs them (`needs_old`) nor a diagnostic.
    """
    sampler: torch.Tensor
    """Log-probs by the engine, fp32 [B, T-1]."""
    reference: torch.Tensor | None
    """Log-probs by the policy that the run started with, fp32 [B, T-1]; None without a KL
    penalty.
    """
    response_mask: torch.Tensor
    """Positions whose next token is learned from, bool [B, T-1]."""
    advantages: torch.Tensor
    """Advantage of each token, fp32 [B, T-1]."""


@dataclass(frozen=True)
class LossShare:
    """A micro-batch's share of its mini-batch's loss, and of its metrics."""

    loss: torch.Tensor
    """Share of the mini-batch's loss, 0-d, with gradient."""
    numbers: dict[str, torch.Tensor | None]
    """Share of the fields of `LossMetrics`, by field, 0-d on the loss's device; None: not
    measured.
    """
    tokens: LossTokens
    """Values of each token of the micro-batch."""

    @property
    def metrics(self) -> LossMetrics:
        """`numbers` as Python numbers. Waits for the device."""
        return LossMetrics.of(self.numbers)


def needs_old(config: LearnerConfig) -> bool:
    """Return whether the loss depends on the old log-probs.

    They may be the ratio's denominator, or part of the correction's weight.
    """
    return not _is_bypassed(config) or not isinstance(config.correction, NoCorrection)


def policy_loss(terms: LossInput, config: LearnerConfig, totals: BatchSize) -> LossShare:
    """Return the loss of one micro-batch, with its metrics.

    totals: size of the mini-batch that the micro-batch is cut from.
    """
    response_mask = terms.response_mask
    corrected = correction(terms.old, terms.sampler, response_mask, config.correction)
    proximal = terms.sampler if _is_bypassed(config) else terms.old
    assert proximal is not None, "the old log-probs are this ratio's denominator (needs_old)"
    inputs = ObjectiveInput(
        current=terms.current,
        proximal=proximal,
        weight=corrected.weight,
        response_mask=response_mask,
        advantages=terms.advantages,
    )
    result = find_objective(config.objective)(inputs, config.objective)
    loss = aggregate(result.loss, response_mask, config.aggregation, totals)
    kl = None
    if isinstance(config.kl, KlConfig):
        assert terms.reference is not None
        kl = kl_estimate(terms.current, terms.reference, response_mask, config.kl.name)
        penalty = aggregate(kl, response_mask, config.aggregation, totals)
        loss = loss + config.kl.coefficient * penalty
    log_ratio = (terms.current - proximal).detach()
    reasons = clip_reasons(
        log_ratio, result.clipped, corrected.truncated, terms.advantages, response_mask
    )
    tokens = LossTokens(log_ratio, reasons)
    numbers = loss_metrics(inputs, result, tokens, terms.old, config, totals)
    numbers["loss"] = loss.detach()
    numbers["corrected"] = _share(corrected.truncated, response_mask, totals)
    if kl is not None:
        numbers["kl"] = _share(kl.detach(), response_mask, totals)
    return LossShare(loss, numbers, tokens)


def loss_metrics(
    inputs: ObjectiveInput,
    result: ObjectiveResult,
    tokens: LossTokens,
    old: torch.Tensor | None,
    config: LearnerConfig,
    totals: BatchSize,
) -> dict[str, torch.Tensor | None]:
    """Return the metrics of ratio and clipping of one micro-batch, by field of `LossMetrics`, 0-d.

    Args:
        inputs: what the objective was given.
        result: what it returned.
        old: log-probs by the learner before the batch, fp32 [B, T-1]. None: unknown, and so are
            the metrics that are made of them.
        totals: size of the mini-batch that the micro-batch is cut from.
    """
    mask = inputs.response_mask
    numbers: dict[str, torch.Tensor | None] = {
        "clipped": _share(result.clipped, mask, totals),
        "phantom_clipped": None,
        "clipped_positive_above": None,
        "clipped_negative_above": None,
        "clipped_negative_below": None,
        "ratio_mean": _share(tokens.log_ratio.exp(), mask, totals),
        "update_log_ratio": None,
    }
    if old is None:
        return numbers
    with torch.no_grad():
        phantom = torch.zeros_like(result.clipped)
        # A ratio to the sampler contains the precision gap: log r = α + β. With the learner's
        # denominator β is gone, so what is clipped now and not then is clipped by the gap alone.
        if _is_bypassed(config):
            without_gap = replace(inputs, proximal=old)
            exact = find_objective(config.objective)(without_gap, config.objective)
            phantom = result.clipped & ~exact.clipped
        update = sequence_log_ratio(inputs.current, old, mask).abs().sum()
    positive_above, negative_above, negative_below = clipped_sides(tokens.clip)
    return numbers | {
        "phantom_clipped": _share(phantom, mask, totals),
        "clipped_positive_above": _share(positive_above & ~phantom, mask, totals),
        "clipped_negative_above": _share(negative_above & ~phantom, mask, totals),
        "clipped_negative_below": _share(negative_below & ~phantom, mask, totals),
        "update_log_ratio": update.double() / totals.sequences,
    }


def _is_bypassed(config: LearnerConfig) -> bool:
    """Return whether ratios are to the sampler, so that the old log-probs are bypassed."""
    return ratio_from(config.correction) == "sampler"


def _share(values: torch.Tensor, response_mask: torch.Tensor, totals: BatchSize) -> torch.Tensor:
    """Return a micro-batch's share of the mini-batch's mean, float64, 0-d.

    values: bool or fp32, of tokens [B, T-1] or of sequences [B, 1].
    """
    values = values.float() if values.dtype == torch.bool else values
    return mean_over_tokens(values, response_mask).sum().double() / totals.sequences
