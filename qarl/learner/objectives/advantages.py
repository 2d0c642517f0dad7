"""Advantages from the rewards of a prompt's group.

    grpo      (R - mean) / std                GRPO (arXiv 2402.03300, section 4.1.2)
    dr_grpo   R - mean                        Dr. GRPO (arXiv 2503.20783): no bias to easy or hard
                                              prompts
    rloo      R - mean of the group's others  RLOO (arXiv 2402.14740, section 2)

"Leave-one-out" is another name of rloo, not a fourth estimator. In a group of S, R - mean of the
others = S/(S-1) · (R - mean), so rloo differs from dr_grpo by that constant alone.
"""

import torch

from qarl.configs.errors import ConfigError

_STD_FLOOR = 1e-6


def group_advantages(rewards: torch.Tensor, estimator: str = "grpo") -> torch.Tensor:
    """Return the advantages within each group, fp32 [G, S].

    A group whose rewards are all equal teaches nothing and gets zeros.

    Args:
        rewards: fp32 [G, S], one row per prompt's group of S ≥ 2 samples.
        estimator: "grpo", "dr_grpo" or "rloo". `ConfigError` for any other.
    """
    if estimator not in ("grpo", "dr_grpo", "rloo"):
        raise ConfigError(f"advantage {estimator!r} must be one of grpo, dr_grpo, rloo")
    centered = rewards - rewards.mean(dim=-1, keepdim=True)
    if estimator == "grpo":
        std = rewards.std(dim=-1, keepdim=True, unbiased=False)
        differ = std > _STD_FLOOR
        scaled = centered / std.clamp_min(_STD_FLOOR)
    else:
        differ = (rewards != rewards[..., :1]).any(-1, keepdim=True)
        samples = rewards.shape[-1]
        scaled = centered * (samples / max(samples - 1, 1)) if estimator == "rloo" else centered
    return torch.where(differ, scaled, torch.zeros_like(centered))
