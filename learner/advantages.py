"""Group-normalized advantages (GRPO, arXiv 2402.03300, eq. 2)."""

import torch

_STD_FLOOR = 1e-6


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(reward - group mean) / group standard deviation.

    rewards: fp32 [G, S], one row per prompt's group of S samples. Returns fp32 [G, S]; a group whose rewards are
    all equal teaches nothing and gets zeros.
    """
    centered = rewards - rewards.mean(dim=-1, keepdim=True)
    std = rewards.std(dim=-1, keepdim=True, unbiased=False)
    return torch.where(std > _STD_FLOOR, centered / std.clamp_min(_STD_FLOOR), torch.zeros_like(centered))
