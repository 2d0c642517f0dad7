"""TBPO in verl and prime-rl, through their own calls, if they are installed.

    pytest scripts/check_other_trainers.py

Neither is in a lock.
"""

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from qarl import losses
from qarl.configs.errors import ConfigError

BOUNDS: dict[str, Any] = {"delta_low": 0.2, "epsilon_high": 0.1, "delta_high": 0.15}


def tensors(
    rows: int = 8, length: int = 6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return new and old log-probs, advantages and a mask with an empty row, for all tokens.

    Some sequences reach a bound.
    """
    torch.manual_seed(0)
    old = -torch.rand(rows, length) - 0.1
    new = (old + 0.3 * torch.randn(rows, 1)).requires_grad_()
    mask = torch.arange(length) < torch.arange(rows)[:, None]
    advantages = torch.randn(rows, 1).expand(rows, length).clone()
    return new, old, advantages, mask


def test_verl_finds_tbpo_and_its_gradient_is_ours():
    """verl finds TBPO by its registry and configuration, and sums over tokens and sequences."""
    pytest.importorskip("verl", reason="in no lock")
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    config = importlib.import_module("verl.workers.config")
    new, old, advantages, mask = tensors()
    actor = config.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=BOUNDS["delta_low"],
        clip_ratio_high=BOUNDS["epsilon_high"],
        clip_ratio_c=1 + BOUNDS["delta_high"],
    )
    tbpo = algorithms.get_policy_loss_fn("tbpo")
    for mode in ("token-mean", "seq-mean-token-mean"):
        loss, metrics = tbpo(old, new, advantages, mask, mode, actor)
        row = slice(1, None)  # verl leaves out rows without tokens, QaRL counts them
        ours = losses.tbpo(
            new[row],
            old[row],
            old[row],
            advantages[row],
            mask[row],
            aggregation=mode,
            correction="none",
            **BOUNDS,
        )
        torch.testing.assert_close(loss, ours.loss)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, new)[0] for each in (loss, ours.loss))
        )
        assert metrics["actor/pg_clipfrac"] > 0 < metrics["actor/pg_clipfrac_lower"]
    weights = torch.full_like(old, 0.5)
    weighted, _ = tbpo(old, new, advantages, mask, "token-mean", actor, weights)
    torch.testing.assert_close(
        2 * weighted, tbpo(old, new, advantages, mask, "token-mean", actor)[0]
    )
    with pytest.raises(ConfigError, match="advantages differ within a response"):
        tbpo(old, new, torch.randn_like(old), mask, "token-mean", actor)


def test_prime_rl_imports_tbpo_and_its_gradient_is_ours():
    """prime-rl imports TBPO as a custom loss and calls it with one sample at a time."""
    loss_module: Any = pytest.importorskip(
        "prime_rl.trainer.rl.loss", reason="in no lock, and not in the registry"
    )
    configs = importlib.import_module("prime_rl.configs.trainer")
    path = "qarl.integrations.prime_rl.tbpo"
    calculate = loss_module.setup_rl_loss_fn(
        configs.CustomLossConfig(type="custom", import_path=path, kwargs=BOUNDS)
    )
    new, old, advantages, mask = tensors()
    ours = losses.tbpo(
        new,
        old,
        old,
        advantages,
        mask,
        aggregation="token-mean",
        correction="none",
        **BOUNDS,
    )
    samples = [
        loss_module.LossInputs(*row)
        for row in zip(new, old, [None] * len(new), advantages, mask, strict=True)
    ]
    outputs = [calculate(sample) for sample in samples]
    torch.testing.assert_close(sum(output.loss for output in outputs) / mask.sum(), ours.loss)
    assert 0 < sum(float(output.metrics["tbpo/clipped"]) for output in outputs) < len(outputs)
    weights = torch.full_like(old[-1], 0.5)
    halved = calculate(dataclasses.replace(samples[-1], loss_weights=weights))
    torch.testing.assert_close(2 * halved.loss, outputs[-1].loss)
