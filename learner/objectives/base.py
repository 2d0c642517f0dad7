"""What every objective takes and gives. Axes: B sequences, T tokens (of the shifted targets)."""

from dataclasses import dataclass
from typing import Protocol

import torch

from qarl.config import ObjectiveConfig


@dataclass(frozen=True)
class ObjectiveInput:
    """current: log-probs under the policy being stepped, fp32 [B, T], with gradient. old: under the learner before
    this batch, fp32 [B, T]. sampler: the engine's, fp32 [B, T]. response: bool [B, T]. advantages: fp32 [B]."""

    current: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    response: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True)
class ObjectiveResult:
    """loss: fp32 [B], each sequence's contribution (the learner averages them). clipped: fp32 [B], share of the
    sequence's tokens whose gradient was cut. log_ratio: fp32 [B], mean_t log(π_cur/π_old)."""

    loss: torch.Tensor
    clipped: torch.Tensor
    log_ratio: torch.Tensor


class Objective(Protocol):
    """A loss over sequences."""

    def __call__(self, given: ObjectiveInput, config: ObjectiveConfig) -> ObjectiveResult:
        """Per-sequence losses to be minimized."""
        ...
