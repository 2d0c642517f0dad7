"""Correction weights for the mismatch between the learner's old policy and the sampler.

    w_t = π_old / π_sampler a token;   w_seq = Π_t w_t;   w_geo = w_seq^(1/T)

    none           1
    token_tis      min(w_t, c)                        Yao et al., "Your efficient RL framework
                                                      secretly brings you off-policy RL training",
                                                      2025
    sequence_tis   min(w_seq, c)                      Liu, Li et al., "When speed kills stability",
                                                      2025
    token_mis      w_t if f ≤ w_t ≤ c, else 0         IcePop (Ling team, 2025)
    sequence_mis   w_seq if f ≤ w_seq ≤ c, else 0     Liu, Li et al., 2025
    geometric      clip(w_geo, 1/c, c)                QaRL (arXiv 2604.07853)

With `ratio_from: sampler` the objective's own ratio π_cur / π_sampler already contains the weight,
so the masked kinds only mask. A masked token still counts in the denominator of an aggregation:
masking makes a step smaller, it does not shift the step onto the other tokens.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass

import torch

from qarl.configs.schema.objectives import AnyCorrection, NoCorrection, TruncatedConfig
from qarl.learner.objectives.ratios import sequence_log_ratio


@dataclass(frozen=True)
class Correction:
    """Weights of the tokens [B, T-1], or of whole sequences [B, 1]."""

    weight: torch.Tensor
    """Weight, fp32, without gradient."""
    truncated: torch.Tensor
    """Whether the weight was cut to a cap, or to 0, bool, same shape."""


def correction(
    old: torch.Tensor | None,
    sampler: torch.Tensor,
    response_mask: torch.Tensor,
    config: AnyCorrection,
) -> Correction:
    """Return the weights of a batch.

    Args:
        old: log-probs by the learner before the batch, fp32 [B, T-1], without gradient. May be None
            if the correction is `none`.
        sampler: log-probs by the engine, fp32 [B, T-1], without gradient.
        response_mask: bool [B, T-1].
    """
    if isinstance(config, NoCorrection):
        ones = torch.ones_like(sampler[:, :1])
        return Correction(ones, torch.zeros_like(ones, dtype=torch.bool))
    assert old is not None, f"correction {config.name!r} is made of the old log-probs"
    log_w = (old - sampler) * response_mask
    if config.name == "geometric":
        weight = sequence_log_ratio(old, sampler, response_mask)[:, None].exp()
        lower = 1.0 / config.cap
    else:
        per_token = config.name in ("token_tis", "token_mis")
        weight = (log_w if per_token else log_w.sum(-1, keepdim=True)).exp()
        lower = None
    if isinstance(config, TruncatedConfig):
        capped = weight.clamp(lower, config.cap)
        return Correction(capped, capped != weight)
    in_range = (weight >= config.floor) & (weight <= config.cap)
    # A ratio to the sampler contains the weight already.
    unmasked = weight if config.ratio_from == "learner" else torch.ones_like(weight)
    return Correction(torch.where(in_range, unmasked, 0.0), ~in_range)
