"""Numbers beyond their dtype's range stop a run, and the error says where they arose; nothing is learned from them."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import nn

from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.learner import Learner
from qarl.learner.optim.loss_scale import MOST_SKIPPED, LossScale, PrecisionError
from qarl.learner.optim.optimizer import MasterOptimizer
from qarl.learner.overflow import first_fault
from tests.support.learners import all_equal, batch_of, make_learner, masters_of, poison


def scaled(dtype: torch.dtype, factors: dict[str, float], scheme: str = "bf16", **config: Any) -> Learner:
    """A learner whose masters of these names are multiplied."""
    learner = make_learner(scheme, dtype, **config)
    with torch.no_grad():
        for name, factor in factors.items():
            learner.model.masters[name].mul_(factor)
    learner.model.refresh()
    return learner


MLP = "model.layers.1.mlp"
OVERFLOWS = {
    "product": ({f"{MLP}.down_proj.weight": 5e4}, f"the output of '{MLP}.down_proj'"),
    "gate times up": ({f"{MLP}.gate_proj.weight": 1e3, f"{MLP}.up_proj.weight": 1e3}, f"modules within '{MLP}'"),
    "norm's copy": ({"model.norm.weight": 1e6}, "the output of 'model.norm.weight'"),
}
BY_ENGINE = {"gate times up": f"the output of '{MLP}.act_fn'", "norm's copy": "the output of 'model.norm'"}
"""What to multiply so that float16 overflows in one place, and how the error names that place, in vLLM's model
otherwise. Activations are about 1: a product of 256 columns is about 0.12 · 16 times the factor."""


@pytest.mark.parametrize("where", OVERFLOWS)
@pytest.mark.parametrize(("scheme", "operators"), [("bf16", "engine"), ("bf16", "transformers"), ("w4a16", "engine")])
def test_an_overflowing_forward_names_its_first_module(where: str, scheme: str, operators: str):
    """Contract: float16 raises before anything is updated, naming place, dtype and remedy; the masters are untouched.
    The remedy is one: the same masters' log-probs are finite in bfloat16."""
    factors, named = OVERFLOWS[where]
    named = BY_ENGINE.get(where, named) if operators == "engine" else named
    learner = scaled(torch.float16, factors, scheme, operators=operators)
    before = masters_of(learner)
    with pytest.raises(PrecisionError) as raised:
        learner.learn(batch_of(), step=0)
    message = str(raised.value)
    assert named in message and "--dtype bfloat16" in message and "float16 ends at 65504" in message
    assert all_equal(masters_of(learner), before)
    assert scaled(torch.bfloat16, factors, scheme, operators=operators).logprobs(batch_of())[0].isfinite().all()


def test_a_finite_forward_has_no_fault_and_keeps_no_hooks():
    learner = make_learner("w4a16", torch.float16)
    batch = batch_of()
    assert first_fault(learner.model, batch, True) is None and first_fault(learner.model, batch, False) is None
    modules = learner.model.run_modules.modules()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def test_log_probs_of_the_engine_that_are_not_finite_are_an_error():
    learner, batch = make_learner(), batch_of()
    spoiled = batch.sampler_logprobs.clone()
    row, position = batch.response_mask.nonzero()[0].tolist()
    spoiled[row, position] = math.nan
    with pytest.raises(PrecisionError, match="the engine's log-probs of 1 of"):
        learner.learn(dataclasses.replace(batch, sampler_logprobs=spoiled), step=0)


def test_a_loss_scale_too_high_for_float16_is_lowered_until_gradients_fit():
    """No gradient is spoiled by hand: 2^40 overflows float16 for real, is halved for each skip, and learning begins."""
    learner = make_learner("w4a16", torch.float16, loss_scale=2.0**40)
    skipped = updates = 0
    for seed in range(20):
        stats = learner.learn(batch_of(), step=seed)
        skipped, updates = skipped + stats.skipped, updates + stats.updates
        if updates:
            break
    assert skipped > 4 and updates and learner.loss_scale.scale == 2.0 ** (40 - skipped) > 1


@pytest.mark.parametrize(("dtype", "skips"), [(torch.float16, 2), (torch.bfloat16, MOST_SKIPPED - 1)])
def test_gradients_that_stay_infinite_end_the_run(dtype: torch.dtype, skips: int):
    """Contract: `skips` updates are left out and counted, the next raises, and the masters are those before them all.
    float16 starts from a scale of 4 here, so two halvings reach 1."""
    learner = make_learner(dtype=dtype, loss_scale=4.0, mini_batches=1)
    before = masters_of(learner)
    poison(learner, f"{MLP}.down_proj.weight", math.inf)
    for seed in range(skips):
        assert learner.learn(batch_of(), step=seed).skipped == 1
    with pytest.raises(PrecisionError, match=f"{skips + 1}.*masters are those before the first of them"):
        learner.learn(batch_of(), step=9)
    assert all_equal(masters_of(learner), before)


def test_good_updates_between_skips_start_the_count_again_and_a_resumed_run_does_not():
    scale = LossScale(False, 1.0, 1)
    for finite in (*[False] * (MOST_SKIPPED - 1), True, *[False] * (MOST_SKIPPED - 1)):
        scale.update(finite)
    assert scale.scale == 1.0, "where none is needed, good updates raise none"
    resumed = LossScale(False, 1.0, 1)
    resumed.load_state_dict(scale.state_dict())
    with pytest.raises(PrecisionError, match=f"{MOST_SKIPPED} updates in a row"):
        resumed.update(False)


@pytest.mark.parametrize("how", ["nearest", "stochastic"])
def test_a_float16_master_beyond_its_range_is_an_error(how: str):
    """65472 + 100 rounds to infinity in float16, whatever the rounding; the error names the master, not its finite
    neighbour. bfloat16 holds both."""
    for dtype in (torch.bfloat16, torch.float16):
        masters = {"small": nn.Parameter(torch.ones(4, dtype=dtype)), "large": nn.Parameter(torch.ones(4, dtype=dtype))}
        with torch.no_grad():
            masters["large"].fill_(65472.0)
        options = {"name": "adamw", "weight_decay": 0.0, "rounding": how}
        optimizer = MasterOptimizer(masters, set(), OptimizerConfig.model_validate(options))
        optimizer.lr = 100.0  # which no configuration has
        for master in masters.values():
            master.grad = -torch.ones(4)
        if dtype == torch.bfloat16:
            optimizer.step()
            continue
        with pytest.raises(PrecisionError, match=r"master 'large' left the range of float16 \(±65504\)"):
            optimizer.step()


def test_a_master_beyond_its_range_is_not_materialized():
    """The step raises inside `learn`, and what would be published is still the version before."""
    learner = make_learner("w4a16", optimizer={"name": "adamw"}, master_dtype="float16")
    for master in learner.model.masters.values():
        master.data = master.data.to(torch.float16)
    steep = learner.config.optimizer.model_copy(update={"lr": 1e5})  # which no configuration has
    fresh = Learner(learner.model, learner.config.model_copy(update={"optimizer": steep}))
    stream = [item.tensor.clone() for item in learner.model.low_bit_tensors()]
    with pytest.raises(PrecisionError, match="left the range of float16"):
        fresh.learn(batch_of(), step=0)
    assert all(torch.equal(i.tensor, s) for i, s in zip(learner.model.low_bit_tensors(), stream, strict=True))
