"""TBPO for verl: `actor.policy_loss.loss_mode=tbpo` (docs/reference/objectives.md).

verl loads this module itself, through the entry point `verl.plugins` of an installed QaRL.
"""

from typing import Any

import torch
from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
    agg_loss,
    register_policy_loss,
)

from qarl import losses


@register_policy_loss("tbpo")
def tbpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return a micro-batch's loss, 0-d with gradient, and its metrics: verl's policy loss.

    Args:
        old_log_prob: Log-probs of the responses before the update, fp32 [B, T], nats.
        log_prob: Log-probs by the policy being stepped, likewise.
        advantages: fp32 [B, T].
        response_mask: [B, T], nonzero at tokens to learn from.
        loss_agg_mode: verl's aggregation.
        config: verl's actor. Its clip_ratio_low is δ_l, clip_ratio_high ε_h, clip_ratio_c 1 + δ_h.
        rollout_is_weights: verl's own rollout correction, fp32 [B, T], or None.

    Raises:
        ConfigError: A bound is out of range, or advantages differ within a response.
    """
    bounds = {
        "delta_low": config.clip_ratio_low,
        "epsilon_high": config.clip_ratio_high,
        "delta_high": config.clip_ratio_c - 1,
    }
    mask = response_mask.bool()
    result = losses.tbpo.of_tokens(
        log_prob, old_log_prob, advantages, mask, rollout_is_weights, **bounds
    )
    loss = agg_loss(result.loss, response_mask, loss_agg_mode, **config.global_batch_info)
    tokens = mask.sum().clamp(min=1)
    positive = advantages >= 0

    def fraction(flags: torch.Tensor) -> float:
        return float((flags & mask).sum() / tokens)

    return loss, {
        "actor/pg_clipfrac": fraction(result.clipped & positive),
        "actor/pg_clipfrac_lower": fraction(result.clipped & ~positive),
        "actor/ppo_kl": float(((old_log_prob - log_prob).detach() * mask).sum() / tokens),
    }
