"""The input and the result of every objective.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ObjectiveInput:
    """Log-probs, weights and advantages of one micro-batch."""

    current: torch.Tensor
    """Log-probs under the policy that is being stepped, fp32 [B, T-1], with gradient."""
    proximal: torch.Tensor
    """Log-probs in the denominator of the ratio, fp32 [B, T-1]: those of the learner before this
    batch, or of the sampler.
    """
    weight: torch.Tensor
    """Correction weight, fp32, of tokens [B, T-1] or of whole sequences [B, 1]."""
    response_mask: torch.Tensor
    """Positions whose next token is learned from, bool [B, T-1]."""
    advantages: torch.Tensor
    """Advantage of each token, fp32 [B, T-1]."""


@dataclass(frozen=True)
class ObjectiveResult:
    """Losses of one micro-batch, not yet aggregated."""

    loss: torch.Tensor
    """Loss of each token, fp32 [B, T-1], or [B, 1] if a response's tokens share it.
    `learner.loss.aggregation` sums it.
    """
    clipped: torch.Tensor
    """Whether a bound was reached, bool [B, T-1] or [B, 1]."""


Objective = Callable[[ObjectiveInput, Any], ObjectiveResult]
"""Function that returns the losses to minimize, of tokens or of sequences, weighted by
`ObjectiveInput.weight`. Its second argument is the objective's own section of the configuration.
"""
