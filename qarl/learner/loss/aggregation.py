"""Aggregation of token losses into one number, the same however a mini-batch is cut.

    seq-mean-token-mean   1/B Σ_b 1/T_b Σ_t ℓ_bt      GRPO (arXiv 2402.03300, eq. 3)
    token-mean            Σ_b Σ_t ℓ_bt / Σ_b T_b      DAPO (arXiv 2503.14476, eq. 8)
    seq-sum               1/B Σ_b 1/L Σ_t ℓ_bt        Dr. GRPO (arXiv 2503.20783), L a constant

B and Σ_b T_b are those of the mini-batch, never of the micro-batch, so the micro-batches' parts add
up exactly.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass

import torch

from qarl.configs.schema.objectives import AnyAggregation, SeqSumAggregation
from qarl.learner.objectives.ratios import sequence_mean


@dataclass(frozen=True)
class BatchSize:
    """Size of a whole mini-batch."""

    sequences: int
    """Number of sequences."""
    tokens: int
    """Number of response tokens."""


def aggregate(
    values: torch.Tensor,
    response_mask: torch.Tensor,
    config: AnyAggregation,
    totals: BatchSize,
) -> torch.Tensor:
    """Return a micro-batch's share of the mini-batch's loss, 0-d.

    A response's tokens share a value, instead of repeating it, so that sequence-level losses are
    free of the rounding of a mean over equal numbers.

    Args:
        values: fp32 [B, T-1], or [B, 1] if a response's tokens share one value.
        response_mask: bool [B, T-1].
        totals: size of the mini-batch.
    """
    if config.name == "seq-mean-token-mean":
        return mean_over_tokens(values, response_mask).sum() / totals.sequences
    sums = (values * response_mask).sum(-1)
    if isinstance(config, SeqSumAggregation):
        return sums.sum() / (totals.sequences * config.constant)
    return sums.sum() / max(totals.tokens, 1)


def mean_over_tokens(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over each response's tokens, fp32 [B]. values: as in `aggregate`."""
    if is_per_sequence(values, response_mask):
        return values[:, 0]
    return sequence_mean(values, response_mask)


def is_per_sequence(values: torch.Tensor, response_mask: torch.Tensor) -> bool:
    """Return whether `values` has one number a sequence instead of one a token."""
    return values.shape[1] == 1 and response_mask.shape[1] != 1
