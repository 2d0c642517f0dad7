"""What every objective takes and gives. Axes: B sequences, T tokens, of which T-1 are predicted."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class ObjectiveInput:
    """current: log-probs under the policy being stepped, fp32 [B, T-1], with gradient. proximal: the denominator of the
    ratio, fp32 [B, T-1]: the learner's before this batch, or the sampler's. weight: the correction's, fp32 [B, T-1], or
    [B, 1] for whole sequences. response_mask: bool [B, T-1]. advantages: fp32 [B, T-1]."""

    current: torch.Tensor
    proximal: torch.Tensor
    weight: torch.Tensor
    response_mask: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class ObjectiveResult:
    """loss: fp32, of each token [B, T-1], or [B, 1] where a response's tokens share it; `learner.loss.aggregation` sums
    it. clipped: bool [B, T-1] or [B, 1], where a bound was reached."""

    loss: torch.Tensor
    clipped: torch.Tensor


class Objective(Protocol):
    """A loss over tokens or sequences, weighted by `inputs.weight`."""

    def __call__(self, inputs: ObjectiveInput, config: Any) -> ObjectiveResult:
        """Losses to be minimized. config: the objective's own section."""
        ...
