"""What every objective takes and gives. Axes: B sequences, T tokens, of which T-1 are predicted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ObjectiveInput:
    """current: log-probs under the policy being stepped, fp32 [B, T-1], with gradient. proximal:
    the denominator of the ratio, fp32 [B, T-1]: the learner's before this batch, or the sampler's.
    weight: the correction's, fp32 [B, T-1], or [B, 1] for whole sequences. response_mask: bool [B,
    T-1]. advantages: fp32 [B, T-1].
    """

    current: torch.Tensor
    proximal: torch.Tensor
    weight: torch.Tensor
    response_mask: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class ObjectiveResult:
    """loss: fp32, of each token [B, T-1], or [B, 1] where a response's tokens share it;
    `learner.loss.aggregation` sums it. clipped: bool [B, T-1] or [B, 1], where a bound was reached.
    """

    loss: torch.Tensor
    clipped: torch.Tensor


Objective = Callable[[ObjectiveInput, Any], ObjectiveResult]
"""Losses to be minimized, of tokens or sequences, weighted by `ObjectiveInput.weight`. Also takes
the objective's own section of the configuration.
"""
