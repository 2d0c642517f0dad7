"""On-policy policy gradient: one update a batch, so the ratio is 1 and there is nothing to clip.

    J = mean over responses of mean_t  w_t · A · log π_cur

REINFORCE with a group baseline (Williams, 1992); the value is reported as -w A.
"""

import torch

from qarl.configs.schema.objectives import OnPolicyConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.ratios import score


def on_policy(inputs: ObjectiveInput, config: OnPolicyConfig) -> ObjectiveResult:
    """-w · A · score of each token."""
    reinforce = inputs.advantages * score(inputs.current)
    return ObjectiveResult(-(inputs.weight * reinforce), torch.zeros_like(inputs.response_mask))
