"""An objective of the user's: found, called as the shipped ones are, and refused with what is wrong."""

from pathlib import Path

import pytest
import torch

from qarl.configs.errors import ConfigError
from qarl.configs.load import load_config
from qarl.configs.schema.objectives import TruncatedConfig
from qarl.learner.loss.aggregation import BatchSize
from qarl.learner.loss.loss import LossInput, policy_loss
from qarl.learner.objectives import find_objective
from qarl.learner.objectives.own import ObjectiveError, own

EXAMPLE = Path(__file__).parents[2] / "examples/own_objective.py"
OWN = {"learner.objective.name": "own", "learner.objective.function": f"{EXAMPLE}:objective"}


def given() -> LossInput:
    """Two sequences of three and two response tokens; the learner is a little off the sampler."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    current = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]]).requires_grad_()
    sampler = current.detach() + torch.tensor([[0.1, 0.0, -0.1], [0.0, 0.2, 0.0]])
    advantages = torch.tensor([1.0, -1.0])[:, None].expand(2, 3) * mask
    return LossInput(current, current.detach().clone(), sampler, None, mask, advantages)


def loss_of(code: str, folder: Path) -> float:
    file = folder / "mine.py"
    file.write_text("import torch\nfrom qarl.learner.objectives import ObjectiveResult as Result\n" + code)
    own.cache_clear()
    config = load_config(None, {**OWN, "learner.objective.function": f"{file}:objective"}).learner
    return float(policy_loss(given(), config, BatchSize(2, 5)).loss.detach())


def test_the_examples_loss_is_the_one_computed_by_hand():
    """Σ over the first sequence alone (A = 1) of -w log π / 3, halved by the mean over sequences; w is token_tis's, the
    default, π_learner/π_sampler."""
    config = load_config(None, OWN).learner
    assert isinstance(config.correction, TruncatedConfig) and config.correction.name == "token_tis"
    inputs = given()
    share = policy_loss(inputs, config, BatchSize(2, 5))
    assert inputs.old is not None
    weight = (inputs.old - inputs.sampler)[0].exp()
    by_hand = (weight * -inputs.current[0].detach()).mean() / 2
    torch.testing.assert_close(share.loss.detach(), by_hand)
    share.loss.backward()
    assert inputs.current.grad is not None
    torch.testing.assert_close(inputs.current.grad[0], -weight / 6)
    assert not inputs.current.grad[1].any()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1.0", r"returned float; return qarl\.learner\.objectives\.ObjectiveResult"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero \(.*mine\.py, line 4, in objective\)"),
        ("import sys; sys.exit(3)", r"raised sys\.exit\(3\) \(.*line 4"),
        ("return Result(inputs.current.sum(), inputs.response_mask)", r"loss \(\); allowed are tensors \(2, 3\)"),
        ("return Result(inputs.current, None)", "clipped NoneType; allowed are tensors"),
        ("return Result(inputs.current, inputs.current > 0)", None),
        ("return Result(inputs.current, inputs.advantages)", r"clipped of torch\.float32; allowed is torch\.bool"),
        ("return Result(inputs.weight, inputs.response_mask)", "a loss without gradient; it must depend on"),
    ],
)
def test_results_are_checked(tmp_path: Path, body: str, said: str | None):
    code = f"def objective(inputs, config):\n    {body}\n"
    if said is None:
        loss_of(code, tmp_path)
    else:
        with pytest.raises(ObjectiveError, match=said):
            loss_of(code, tmp_path)


def test_one_that_is_not_found_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no function 'objective'"):
        loss_of("", tmp_path)
    with pytest.raises(ConfigError, match=r"must read file\.py:function.*taking \(inputs, config\)"):
        find_objective(load_config(None, {**OWN, "learner.objective.function": "mine"}).learner.objective)
    with pytest.raises(ConfigError, match=r"is missing; give --learner\.objective\.function: .* file\.py:function"):
        load_config(None, {"learner.objective.name": "own"})
