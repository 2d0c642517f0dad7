"""TBPO as verl and prime-rl call it. Neither is installed with QaRL: what is theirs is here as far
as it is called.
"""

import importlib
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from qarl import losses

BOUNDS = {"delta_low": 0.1, "epsilon_high": 0.2, "delta_high": 0.3}
MASK = torch.tensor(
    [[True, True, False], [True, True, True], [True, False, False], [True, True, True]]
)
OLD = torch.linspace(-3, -1, 12).view(4, 3)
NEW = OLD + torch.tensor([[0.4], [-0.4], [0.4], [0.01]]).expand(4, 3) * MASK
ADVANTAGES = torch.tensor([[1.0], [-1.0], [-2.0], [1.0]]).expand(4, 3) * MASK


def of(monkeypatch: pytest.MonkeyPatch, name: str, package: str, **theirs: Any) -> Any:
    """The integration `name`, over a module `package` that has what is `theirs`."""
    parts = package.split(".")
    for part in itertools.accumulate(parts, "{}.{}".format):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for key, value in theirs.items():
        setattr(sys.modules[package], key, value)
    monkeypatch.delitem(sys.modules, f"qarl.integrations.{name}", raising=False)
    return importlib.import_module(f"qarl.integrations.{name}").tbpo


def test_verl_sums_tbpo_by_itself(monkeypatch: pytest.MonkeyPatch):
    """Bounds are the actor's; its weights count; of a batch's tokens 2 are clipped with A > 0, and
    4 with A < 0.
    """

    def agg_loss(
        loss: torch.Tensor,
        mask: torch.Tensor,
        mode: str,
        count: float,
    ) -> torch.Tensor:
        assert mode == "token-mean"
        return (loss * mask).sum() / count

    registered = []

    def register_policy_loss(name: str) -> Any:
        registered.append(name)
        return lambda function: function

    theirs = {"agg_loss": agg_loss, "register_policy_loss": register_policy_loss}
    tbpo = of(monkeypatch, "verl", "verl.trainer.ppo.core_algos", **theirs)
    assert registered == ["tbpo"]
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2, "clip_ratio_c": 1.3}
    config = SimpleNamespace(**bounds, global_batch_info={"count": 9.0})
    weights = torch.linspace(0.5, 1.5, 12).view(4, 3)
    current = NEW.clone().requires_grad_()
    loss, metrics = tbpo(OLD, current, ADVANTAGES, MASK.long(), "token-mean", config, weights)
    expected = losses.tbpo.of_tokens(NEW, OLD, ADVANTAGES, MASK, weights, **BOUNDS)
    assert torch.equal(loss, (expected.loss * MASK).sum() / 9)
    assert [*metrics.values()] == pytest.approx(
        [2 / 9, 4 / 9, -(2 * 0.4 - 3 * 0.4 + 0.4 + 3 * 0.01) / 9], abs=1e-6
    )
    loss.backward()
    assert current.grad is not None
    assert current.grad[3].all()
    assert not current.grad[:3].any()


def test_prime_rl_sums_tbpo_over_a_sample(monkeypatch: pytest.MonkeyPatch):
    tbpo = of(
        monkeypatch,
        "prime_rl",
        "prime_rl.trainer.rl.loss",
        LossInputs=None,
        LossOutputs=SimpleNamespace,
    )
    for row, weights in ((0, None), (3, torch.tensor([0.5, 1.0, 2.0]))):
        inputs = SimpleNamespace(
            trainer_logprobs=NEW[row],
            inference_logprobs=OLD[row],
            advantages=ADVANTAGES[row],
            loss_mask=MASK[row],
            loss_weights=weights,
        )
        output = tbpo(inputs, **BOUNDS)
        one = slice(row, row + 1)
        more = None if weights is None else weights[None]
        expected = losses.tbpo.of_tokens(
            NEW[one], OLD[one], ADVANTAGES[one], MASK[one], more, **BOUNDS
        )
        assert torch.equal(output.loss, expected.loss[MASK[one]].sum())
        assert output.loss.ndim == 0
        assert float(output.metrics["tbpo/clipped"]) == (1.0 if row == 0 else 0.0)
    inputs.loss_mask = torch.zeros(3, dtype=torch.bool)
    assert float(tbpo(inputs).loss) == float(tbpo(inputs).metrics["tbpo/clipped"]) == 0.0
