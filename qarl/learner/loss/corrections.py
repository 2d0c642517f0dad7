"""Correction weights: how far the learner's old policy is from the sampler that drew the tokens.

    w_t = π_old / π_sampler a token;   w_seq = Π_t w_t;   w_geo = w_seq^(1/T)

    none           1 token_tis      min(w_t, c)                   Yao et al., "Your efficient RL
    framework secretly brings you
                                                 off-policy RL training", 2025
    sequence_tis   min(w_seq, c)                 Liu, Li et al., "When speed kills stability", 2025
    token_mis      w_t where f ≤ w_t ≤ c, else 0     IcePop (Ling team, 2025)
    sequence_mis   w_seq where f ≤ w_seq ≤ c, else 0    Liu, Li et al., 2025
    geometric      clip(w_geo, 1/c, c)           QaRL (arXiv 2604.07853)

With `ratio_from: sampler` the objective's own ratio π_cur / π_sampler holds the weight already, so
the masked kinds only mask. A masked token still counts where an aggregation divides: masking
shrinks a step, it does not shift it onto the other tokens.

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from dataclasses import dataclass

import torch

from qarl.configs.schema.objectives import AnyCorrection, NoCorrection, TruncatedConfig
from qarl.learner.objectives.ratios import sequence_log_ratio


@dataclass(frozen=True)
class Correction:
    """weight: fp32, of tokens [B, T-1] or sequences [B, 1]. truncated: bool, same shape: cut to a
    cap, or to 0.
    """

    weight: torch.Tensor
    truncated: torch.Tensor


def correction(
    old: torch.Tensor | None,
    sampler: torch.Tensor,
    response_mask: torch.Tensor,
    config: AnyCorrection,
) -> Correction:
    """Weights of a batch. old, sampler: log-probs, fp32 [B, T-1], no gradient; response_mask: bool
    [B, T-1]. old may be None where the correction is `none`.
    """
    if isinstance(config, NoCorrection):
        ones = torch.ones_like(sampler[:, :1])
        return Correction(ones, torch.zeros_like(ones, dtype=torch.bool))
    assert old is not None, f"correction {config.name!r} is made of the old log-probs"
    log_w = (old - sampler) * response_mask
    if config.name == "geometric":
        weight, least = (
            sequence_log_ratio(old, sampler, response_mask)[:, None].exp(),
            1.0 / config.cap,
        )
    else:
        of_tokens = config.name in ("token_tis", "token_mis")
        weight, least = (
            (log_w if of_tokens else log_w.sum(-1, keepdim=True)).exp(),
            None,
        )
    if isinstance(config, TruncatedConfig):
        capped = weight.clamp(least, config.cap)
        return Correction(capped, capped != weight)
    kept = (weight >= config.floor) & (weight <= config.cap)
    inside = weight if config.ratio_from == "learner" else torch.ones_like(weight)
    return Correction(torch.where(kept, inside, 0.0), ~kept)
