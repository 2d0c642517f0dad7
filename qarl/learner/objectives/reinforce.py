"""REINFORCE with a weight that has no gradient: J = Σ weight · A · log π_cur.

The value of the loss is -w · weight · A; only its gradient is that of J.
"""

import torch

from qarl.configs.schema.objectives import CispoConfig, OnPolicyConfig, PgSeqIsConfig
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult
from qarl.learner.objectives.ratios import score, token_ratio

_LOG_BOUND = 20.0
"""Bound on |log W| of `pg_seq_is`, nats, so that W stays finite in float32."""


def on_policy(inputs: ObjectiveInput, config: OnPolicyConfig) -> ObjectiveResult:
    """Return -w · A · score of each token.

    There is one update a batch, so the ratio is 1 and there is nothing to clip. Source: REINFORCE
    (Williams, 1992) with a group baseline.
    """
    reinforce = inputs.advantages * score(inputs.current)
    return ObjectiveResult(-(inputs.weight * reinforce), torch.zeros_like(inputs.response_mask))


def cispo(inputs: ObjectiveInput, config: CispoConfig) -> ObjectiveResult:
    """Return -w · min(r_t, c) · A · score of each token, so that no token loses its gradient.

    `clipped` marks capped ratios. Source: MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5; without a
    lower bound, as used there).
    """
    ratio = token_ratio(inputs).detach()
    reinforce = ratio.clamp_max(config.ratio_cap) * inputs.advantages * score(inputs.current)
    return ObjectiveResult(-(inputs.weight * reinforce), ratio > config.ratio_cap)


def pg_seq_is(inputs: ObjectiveInput, config: PgSeqIsConfig) -> ObjectiveResult:
    """Return -w · W · A · score of each token.

    W = Π_t π_cur / π_proximal of the whole sequence, so this is the unbiased off-policy gradient.
    `clipped` marks sequences whose log W was clamped to ±20, so that float32 stays finite.

    Source: "Defeating the training-inference mismatch via FP16" (arXiv 2510.26788, section 4). By
    default π_proximal is the sampler (`ratio_from: sampler`), as there. Against the learner, the
    corrections `sequence_tis` and `sequence_mis` give its truncated and masked variants, except for
    the drift within a batch.
    """
    log_ratio = inputs.current.detach() - inputs.proximal
    log_weight = (log_ratio * inputs.response_mask).sum(-1, keepdim=True)
    weight = log_weight.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    reinforce = weight * inputs.advantages * score(inputs.current)
    return ObjectiveResult(-(inputs.weight * reinforce), log_weight.abs() > _LOG_BOUND)
