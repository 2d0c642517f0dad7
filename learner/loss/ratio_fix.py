"""Remedies for phantom clipping: tokens whose gradient is cut although the policy has not moved.

Where learner and sampler compute in different precision, the ratio is log r = α + β: α how far the policy moved since
it sampled, β how far the two computations of one policy differ. A clip sees their sum ("Defeating the
trainer-generator precision mismatch in TRL", Hugging Face, 2026). The fixes:

    matched precision   QaRL itself (`learner.aligned`): β is removed where it comes from
    shadow_forward      the ratio's value from log-probs in the engine's precision, the gradient from the plain forward
    no_clip             bounds at 10, so that β cannot reach them (`Objective.unclipped`)
    detached            the bounded ratio weights the score function ∇log π instead of gating it

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

import torch

from learner.loss.aggregation import is_shared
from learner.objectives.base import ObjectiveInput, ObjectiveResult
from learner.objectives.ratios import score, sequence_mean


def shadowed(current: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """The shadow's values with `current`'s gradient, fp32 [B, T-1]. shadow: without gradient."""
    return shadow + (current - current.detach())


def detached(result: ObjectiveResult, given: ObjectiveInput) -> ObjectiveResult:
    """The same losses as weights of the score function: gradient ℓ_t ∇log π_t, also where the bound was reached.

    Inside the bounds that is the objective's own gradient, since ℓ = -w r A and ∇r = r ∇log π (for a sequence ratio,
    the mean of ∇log π over its tokens).
    """
    if is_shared(result.loss, given.response_mask):
        scored = score(sequence_mean(given.current, given.response_mask))[:, None]
    else:
        scored = score(given.current)
    return ObjectiveResult(result.loss.detach() * scored, torch.zeros_like(result.clipped))
