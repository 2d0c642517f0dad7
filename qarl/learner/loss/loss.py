"""A micro-batch's share of the loss: correction → objective → aggregation → KL penalty.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass, replace

import torch

from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import KlConfig, NoCorrection, ratio_from
from qarl.learner.loss.aggregation import BatchSize, aggregate, over_tokens
from qarl.learner.loss.corrections import correction
from qarl.learner.loss.kl import kl_estimate
from qarl.learner.loss.metrics import LossMetrics
from qarl.learner.loss.tokens import LossTokens, clip_reasons, clipped_sides
from qarl.learner.objectives import ObjectiveInput, find_objective
from qarl.learner.objectives.ratios import sequence_log_ratio


@dataclass(frozen=True)
class LossInput:
    """Log-probs of the same tokens, fp32 [B, T-1]: current (being stepped, with gradient), old (the
    learner before the batch; None where `needs_old` says no and nobody asked), sampler (the
    engine's), reference (the policy the run started with; None without a KL penalty).
    response_mask: bool [B, T-1]. advantages: fp32 [B, T-1].
    """

    current: torch.Tensor
    old: torch.Tensor | None
    sampler: torch.Tensor
    reference: torch.Tensor | None
    response_mask: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class LossShare:
    """loss: a micro-batch's share of the mini-batch's, 0-d, with gradient. numbers: its share of
    `LossMetrics`' fields, 0-d on its device. tokens: of the micro-batch.
    """

    loss: torch.Tensor
    numbers: dict[str, torch.Tensor | None]
    tokens: LossTokens

    @property
    def metrics(self) -> LossMetrics:
        """`numbers`, for which the host waits."""
        return LossMetrics.of(self.numbers)


def needs_old(config: LearnerConfig) -> bool:
    """Whether the loss has the old log-probs in it: as the ratio's denominator, or in the
    correction's weight.
    """
    return ratio_from(config.correction) != "sampler" or not isinstance(
        config.correction, NoCorrection
    )


def policy_loss(terms: LossInput, config: LearnerConfig, totals: BatchSize) -> LossShare:
    """The loss of one micro-batch. totals: of the mini-batch it is cut from."""
    response_mask = terms.response_mask
    weights = correction(terms.old, terms.sampler, response_mask, config.correction)
    bypass = ratio_from(config.correction) == "sampler"
    objective, section = find_objective(config.objective), config.objective
    proximal = terms.sampler if bypass else terms.old
    assert proximal is not None, "the old log-probs are this ratio's denominator (needs_old)"
    inputs = ObjectiveInput(
        current=terms.current,
        proximal=proximal,
        weight=weights.weight,
        response_mask=response_mask,
        advantages=terms.advantages,
    )
    result = objective(inputs, section)
    loss = aggregate(result.loss, response_mask, config.aggregation, totals)

    def share(values: torch.Tensor) -> torch.Tensor:
        values = values.float() if values.dtype == torch.bool else values
        return over_tokens(values, response_mask).sum().double() / totals.sequences

    log_ratio = (terms.current - proximal).detach()
    reasons = clip_reasons(
        log_ratio, result.clipped, weights.truncated, terms.advantages, response_mask
    )
    phantom_clipped = update_log_ratio = None
    sides: tuple[torch.Tensor | None, ...] = (None, None, None)
    if terms.old is not None:
        with torch.no_grad():
            phantom = torch.zeros_like(result.clipped)
            if bypass:  # log r = α + β here; with the learner's denominator β is gone
                phantom = (
                    result.clipped
                    & ~objective(replace(inputs, proximal=terms.old), section).clipped
                )
            update = sequence_log_ratio(terms.current, terms.old, response_mask).abs().sum()
        phantom_clipped, update_log_ratio = (
            share(phantom),
            update.double() / totals.sequences,
        )
        sides = tuple(share(side & ~phantom) for side in clipped_sides(reasons))
    kl = {}
    if isinstance(config.kl, KlConfig):
        assert terms.reference is not None
        estimate = kl_estimate(terms.current, terms.reference, response_mask, config.kl.name)
        loss = loss + config.kl.coefficient * aggregate(
            estimate, response_mask, config.aggregation, totals
        )
        kl = {"kl": share(estimate.detach())}
    numbers = dict(
        loss=loss.detach(),
        clipped=share(result.clipped),
        phantom_clipped=phantom_clipped,
        clipped_positive_above=sides[0],
        clipped_negative_above=sides[1],
        clipped_negative_below=sides[2],
        corrected=share(weights.truncated),
        ratio_mean=share(log_ratio.exp()),
        update_log_ratio=update_log_ratio,
        **kl,
    )
    return LossShare(loss, numbers, LossTokens(log_ratio, reasons))
