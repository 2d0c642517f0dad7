"""A micro-batch's share of the loss: correction → objective → aggregation → KL penalty.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass, replace

import torch

from configs.schema.learner import LearnerConfig
from configs.schema.objectives import KlConfig, NoCorrection, ratio_from
from learner.loss.aggregation import Totals, aggregate, over_tokens
from learner.loss.corrections import correction
from learner.loss.kl import kl_estimate
from learner.loss.metrics import LossMetrics
from learner.objectives import ObjectiveInput, find_objective
from learner.objectives.ratios import sequence_log_ratio


@dataclass(frozen=True)
class LossInput:
    """Log-probs of the same tokens, fp32 [B, T-1]: current (being stepped, with gradient), old (the learner before the
    batch; None where `needs_old` says no and nobody asked), sampler (the engine's), reference (the policy the run
    started with; None without a KL penalty). response_mask: bool [B, T-1]. advantages: fp32 [B, T-1]."""

    current: torch.Tensor
    old: torch.Tensor | None
    sampler: torch.Tensor
    reference: torch.Tensor | None
    response_mask: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class LossTokens:
    """What the loss made of each token, without gradient. log_ratio: log π_cur - log π_proximal, fp32 [B, T-1].
    clipped, corrected: the objective's bound was reached, the mismatch weight was capped or masked; bool, of each token
    [B, T-1] or of each sequence [B, 1]."""

    log_ratio: torch.Tensor
    clipped: torch.Tensor
    corrected: torch.Tensor

    def to_cpu(self) -> "LossTokens":
        """The same in the host's memory."""
        return LossTokens(self.log_ratio.cpu(), self.clipped.cpu(), self.corrected.cpu())


@dataclass(frozen=True)
class LossShare:
    """loss: a micro-batch's share of the mini-batch's, 0-d, with gradient. metrics: its share of the other numbers.
    tokens: of the micro-batch."""

    loss: torch.Tensor
    metrics: LossMetrics
    tokens: LossTokens


def needs_old(config: LearnerConfig) -> bool:
    """Whether the loss has the old log-probs in it: as the ratio's denominator, or in the correction's weight."""
    return ratio_from(config.correction) != "sampler" or not isinstance(config.correction, NoCorrection)


def policy_loss(given: LossInput, config: LearnerConfig, totals: Totals) -> LossShare:
    """The loss of one micro-batch. totals: of the mini-batch it is cut from."""
    response_mask = given.response_mask
    weights = correction(given.old, given.sampler, response_mask, config.correction)
    bypass = ratio_from(config.correction) == "sampler"
    objective, section = find_objective(config.objective), config.objective
    proximal = given.sampler if bypass else given.old
    assert proximal is not None, "the old log-probs are this ratio's denominator (needs_old)"
    inputs = ObjectiveInput(
        current=given.current,
        proximal=proximal,
        weight=weights.weight,
        response_mask=response_mask,
        advantages=given.advantages,
    )
    result = objective(inputs, section)
    loss = aggregate(result.loss, response_mask, config.aggregation, totals)

    def share(flags: torch.Tensor) -> float:
        return float(over_tokens(flags.float(), response_mask).sum()) / totals.sequences

    phantom_clipped = update_log_ratio = None
    if given.old is not None:
        with torch.no_grad():
            phantom = torch.zeros_like(result.clipped)
            if bypass:  # log r = α + β here; with the learner's denominator β is gone
                phantom = result.clipped & ~objective(replace(inputs, proximal=given.old), section).clipped
            log_ratio = sequence_log_ratio(given.current, given.old, response_mask).abs().sum()
        phantom_clipped, update_log_ratio = share(phantom), float(log_ratio) / totals.sequences
    kl = 0.0
    if isinstance(config.kl, KlConfig):
        assert given.reference is not None
        estimate = kl_estimate(given.current, given.reference, response_mask, config.kl.name)
        loss = loss + config.kl.coefficient * aggregate(estimate, response_mask, config.aggregation, totals)
        kl = float(over_tokens(estimate.detach(), response_mask).sum()) / totals.sequences
    metrics = LossMetrics(
        loss=float(loss.detach()),
        clipped=share(result.clipped),
        phantom_clipped=phantom_clipped,
        corrected=share(weights.truncated),
        update_log_ratio=update_log_ratio,
        kl=kl,
    )
    tokens = LossTokens((given.current - proximal).detach(), result.clipped, weights.truncated)
    return LossShare(loss, metrics, tokens)
