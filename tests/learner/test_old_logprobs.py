"""Old log-probs are computed where something is made of them, and are the same wherever they come from."""

from typing import Any

import pytest
import torch

from qarl.learner.learner import Learner
from tests.support.learners import batch_of, make_learner

FP32: dict[str, Any] = {"dtype": torch.float32}
BYPASS = {"name": "none", "ratio_from": "sampler"}


def forwards_without_gradient(learner: Learner) -> list[int]:
    """A list that grows by the rows of each forward that no gradient is taken of."""
    rows: list[int] = []
    policy = learner.scorer._policy

    def counted(function: Any, tokens: torch.Tensor, *rest: Any) -> Any:
        if not torch.is_grad_enabled():
            rows.append(len(tokens))
        return policy(function, tokens, *rest)

    learner.scorer._policy = counted
    return rows


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"mini_batches": 1}, 0.0),
        ({"mini_batches": 2}, 0.5),
        ({"mini_batches": 3}, 2 / 3),
        ({"mini_batches": 3, "correction": BYPASS}, 0.0),
        ({"mini_batches": 2, "correction": {"name": "token_mis", "ratio_from": "sampler"}}, 0.5),
        ({"mini_batches": 2, "correction": BYPASS, "diagnostics_every": 1}, 2.0),
        ({"mini_batches": 2, "aligned": False, "ratio_fix": "shadow_forward", "correction": BYPASS}, 2.0),
    ],
)
def test_forwards_without_gradient(config: dict[str, Any], share: float):
    """Share of the batch's rows that are computed without a gradient. The last group of `make_groups` teaches nothing,
    so the first mini-batch that is trained may not be the first. Steps that are measured score the last mini-batch once
    more, after its update; the first of them the first mini-batch too, before and after, for the distance from the
    start."""
    learner, batch = make_learner(**FP32, objective={"name": "grpo"}, **config), batch_of()
    rows = forwards_without_gradient(learner)
    stats = learner.learn(batch, step=0)
    assert sum(rows) == round(share * len(batch.tokens))
    assert (stats.update_log_ratio is None) == (config.get("correction") == BYPASS and share == 0)


@pytest.mark.parametrize("name", ["tbpo", "grpo", "gspo"])
def test_they_are_the_same_as_those_computed_beforehand(name: str):
    """Contract: with a gate all are computed before the update. Both ways differ in the last bit at most, for rows are
    multiplied in other micro-batches; fp32 keeps that small."""
    beforehand, within = (make_learner(**FP32, objective={"name": name}, optimizer={"lr": 1e-5}) for _ in range(2))
    mismatches = []
    first = beforehand.learn(batch_of(), 0, mismatches.append)
    second = within.learn(batch_of(), 0)
    assert mismatches == [first.mismatch]
    for field in ("loss", "entropy", "update_log_ratio", "grad_norm", "clipped", "corrected"):
        assert getattr(second, field) == pytest.approx(getattr(first, field), rel=1e-3, abs=1e-6), field
    assert vars(second.mismatch) == pytest.approx(vars(first.mismatch), rel=1e-4, abs=1e-5)


def test_ratios_of_the_first_update_are_one():
    """Whatever the policy rounds: nothing is clipped before anything has moved."""
    learner = make_learner("w8a8", mini_batches=1, objective={"name": "gspo"})
    stats = learner.learn(batch_of(), 0)
    assert (stats.clipped, stats.update_log_ratio) == (0.0, 0.0)
