"""Means and ratios over responses, and PPO's pessimistic clip on any ratio.

Source: PPO (arXiv 1707.06347, eq. 7); dual clip (arXiv 1912.09729).

Axes: B sequences, T tokens, of which T-1 are predicted.
"""

from typing import Any

import torch

from qarl.configs.errors import ConfigError
from qarl.learner.objectives.base import ObjectiveInput, ObjectiveResult


def sequence_mean(values: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over each response's tokens, fp32 [B]; 0 for a row without a response.

    values: fp32 [B, T-1]. response_mask: bool [B, T-1].
    """
    return (values * response_mask).sum(-1) / response_mask.sum(-1).clamp_min(1)


def sequence_log_ratio(
    numerator: torch.Tensor, denominator: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """Return mean_t(log numerator - log denominator) of each response, fp32 [B].

    That is the log of a geometric-mean ratio.
    """
    return sequence_mean(numerator - denominator, response_mask)


def shadowed(current: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """Return the shadow's values with `current`'s gradient, fp32 [B, T-1] (`learner.ratio_fix`).

    shadow: log-probs without gradient.
    """
    return shadow + (current - current.detach())


def score(logprobs: torch.Tensor) -> torch.Tensor:
    """Return exactly 1, with the gradient of the log-probs.

    So x.detach() · score(log π) is REINFORCE's estimator, with the gradient x ∇log π.
    """
    return 1.0 + (logprobs - logprobs.detach())


def token_ratio(inputs: ObjectiveInput) -> torch.Tensor:
    """Return π_cur / π_proximal of each token, fp32 [B, T-1]."""
    return (inputs.current - inputs.proximal).exp()


def sequence_ratio(inputs: ObjectiveInput) -> torch.Tensor:
    """Return exp(mean_t(log π_cur - log π_proximal)), fp32 [B, 1].

    Source: GSPO (arXiv 2507.18071, eq. 7).
    """
    return sequence_log_ratio(inputs.current, inputs.proximal, inputs.response_mask)[:, None].exp()


def sequence_advantages(inputs: ObjectiveInput) -> torch.Tensor:
    """Return the advantage that a response's tokens share, fp32 [B, 1].

    It is 0 for a row without a response. Raises `ConfigError` if the tokens do not share one, to
    the last bit: an objective with one ratio a sequence cannot weigh its tokens.
    """
    mask = inputs.response_mask
    advantages = inputs.advantages
    first = mask.int().argmax(-1, keepdim=True)
    shared = advantages.gather(-1, first).where(mask.any(-1, keepdim=True), 0.0)
    wrong = (mask & (advantages != shared)).any(-1)
    if wrong.any():
        row = int(wrong.int().argmax())
        values = advantages[row][mask[row]]
        raise ConfigError(
            f"advantages differ within a response ({float(values.min()):g} to"
            f" {float(values.max()):g}), and this objective has one ratio for the whole of it; take"
            " an objective with a ratio for each token, such as grpo or dapo, or give each"
            " response one advantage"
        )
    return shared


def clipped_surrogate(
    inputs: ObjectiveInput,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    config: Any,
    dual: float | None = None,
) -> ObjectiveResult:
    """Return -w · min(r A, clip(r, 1 - ε_l, 1 + ε_h) A), and where the clip decided.

    Args:
        ratio: fp32 [B, T-1], or [B, 1] of whole sequences.
        advantages: fp32, same shape.
        config: a section with `clip_low` and `clip_high`.
        dual: c of the dual clip. The minimum does not fall below c A if A < 0. None: PPO's clip,
            which leaves a negative sample's ratio unbounded above.
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    surrogate = torch.minimum(plain, bounded)
    is_clipped = bounded < plain
    if dual is not None:
        floor = dual * advantages
        below = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(below, floor, surrogate)
        is_clipped = is_clipped | below
    return ObjectiveResult(-(inputs.weight * surrogate), is_clipped)
