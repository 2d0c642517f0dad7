"""An objective of your own: REINFORCE on the better half alone.

qarl train --objective own --learner.objective.function examples/own_objective.py:objective

    J = mean over tokens of w_t · max(A_t, 0) · log π_cur

`inputs` holds what every objective gets, fp32 [B, T-1] each: `current` (log-probs of the policy
being stepped, with gradient), `proximal` (the older ones, for a ratio), `weight` (of the correction
for the sampler's mismatch), `advantages`, and `response_mask` (bool). Return losses to be
minimized, and where a bound was reached.
"""

import torch

from qarl.learner.objectives import ObjectiveInput, ObjectiveResult


def objective(inputs: ObjectiveInput, config) -> ObjectiveResult:
    """-w · max(A, 0) · log π of each token; nothing is clipped."""
    loss = -inputs.weight * inputs.advantages.clamp_min(0) * inputs.current
    return ObjectiveResult(loss, torch.zeros_like(inputs.response_mask))
