"""Objective of your own: REINFORCE on completions of positive advantage only.

qarl train --objective own --learner.objective.function examples/own_objective.py:objective

    J = mean over tokens of w_t · max(A_t, 0) · log π_cur

`inputs` holds the tensors that every objective gets, fp32 [B, T-1] each: `current` (log-probs by
the policy that is being stepped, with gradient), `proximal` (older log-probs, for a ratio),
`weight` (weight that corrects the sampler's mismatch), `advantages`, and `response_mask` (bool). An
objective returns the losses to minimize, and which of them reached a bound.
"""

import torch

from qarl.learner.objectives import ObjectiveInput, ObjectiveResult


def objective(inputs: ObjectiveInput, config) -> ObjectiveResult:
    """Return -w · max(A, 0) · log π of each token. Nothing is clipped."""
    loss = -inputs.weight * inputs.advantages.clamp_min(0) * inputs.current
    return ObjectiveResult(loss, torch.zeros_like(inputs.response_mask))
