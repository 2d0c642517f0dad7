"""Tests of the learner on a tiny random model: when log-probs are computed, accumulation, skipped
updates, resuming, and the memory that is reserved for its first step while the engine starts.
Numbers beyond their dtype's range stop a run; the error names their origin, and nothing is learned
from them.
"""

import dataclasses
import io
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import LearnerConfig, OptimizerConfig
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.batching import Batch, make_batch
from qarl.learner.diagnostics.ages import MismatchByAge
from qarl.learner.diagnostics.base import Observer
from qarl.learner.diagnostics.lost_updates import LostUpdates
from qarl.learner.learner import Learner
from qarl.learner.logprobs import token_logprobs
from qarl.learner.optim.loss_scale import MOST_SKIPPED, LossScale, PrecisionError
from qarl.learner.optim.optimizer import MasterOptimizer
from qarl.learner.optim.sharded import ShardedOptimizer
from qarl.learner.reserve import reserved, step_bytes
from qarl.quant.layers.context import Forward
from qarl.quant.model.add_lora import add_adapters
from qarl.quant.model.kept_scales import keep_scales
from qarl.quant.runtime.shards import mesh_of_all, share
from qarl.quant.schemes import COMPUTE_DTYPES, SCHEMES
from tests.support import learners
from tests.support.learners import (
    SAMPLES,
    all_equal,
    batch_of,
    experts_policy,
    make_groups,
    make_learner,
    masters_of,
    poison,
)
from tests.support.models import (
    collected_gradients,
    multiply_masters,
    same_stream,
    stream_bytes,
)
from tests.support.one_of_several import one_of_several


def gradients_of_learning(
    learner: Learner, batch: Batch
) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Learn a batch without stepping.

    Return the gradients that the optimizer receives in each update, unclipped and unscaled, and the
    statistics.
    """
    seen: list[dict[str, torch.Tensor]] = []

    def record(diagnose: bool = False) -> None:
        seen.append(collected_gradients(learner.model))

    assert isinstance(learner.optimizer, ShardedOptimizer)
    learner.optimizer.optimizer.step = record
    return seen, learner.learn(batch, step=3)


@pytest.mark.parametrize(
    ("objective", "aggregation"),
    [
        ("tbpo", "seq-mean-token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("dapo", "token-mean"),
        ("gspo", "seq-sum"),
    ],
)
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_accumulation_changes_nothing(objective: str, aggregation: str, mini_batches: int):
    """Contract: cutting a mini-batch into micro-batches, down to one sequence each, gives the
    gradients and the mean statistics of one forward over all of it.

    Derivation: each sequence's loss is divided by the mini-batch's size (token-mean: by its
    tokens), wherever it is computed. In float32 and without steps only the order of sums differs.
    """

    def run(budget: int):
        settings: dict[str, Any] = {
            "objective": {"name": objective},
            "aggregation": {"name": aggregation},
        }
        settings |= {
            "micro_batch_tokens": budget,
            "mini_batches": mini_batches,
            "optimizer": {"grad_clip": 1e9},
        }
        learner = make_learner(dtype=torch.float32, **settings)
        return gradients_of_learning(learner, batch_of())

    whole, stats = run(10**6)
    assert len(whole) == stats.updates == mini_batches
    assert stats.grad_norm > 0
    for budget in (1, 37, 150):
        parts, other = run(budget)
        for ours, theirs in zip(parts, whole, strict=True):
            assert ours.keys() == theirs.keys()
            assert len(ours) == len(make_learner().model.masters)
            for name, gradient in ours.items():
                assert (gradient - theirs[name]).norm() <= 1e-4 * theirs[name].norm() + 1e-9, name
        for field in ("loss", "grad_norm", "clipped", "entropy", "update_log_ratio"):
            assert getattr(other, field) == pytest.approx(
                getattr(stats, field), rel=1e-4, abs=1e-5
            ), field
        assert dataclasses.astuple(other.mismatch) == pytest.approx(
            dataclasses.astuple(stats.mismatch), rel=1e-4
        )


def test_the_gradient_is_the_objectives_by_hand():
    """Contract: on the first update the policy is the old one, r = 1, so TBPO's gradient is that of
    -(1/B) Σ_b w̃_b A_b mean_t log π(token).

    Expected is autograd of that sum through the same model; w̃ is computed here from the log-probs.
    The reported norm is that gradient's, and grad_clip scales the gradient.
    """
    learner = make_learner(dtype=torch.float32, mini_batches=1, optimizer={"grad_clip": 0.01})
    batch = batch_of()
    (given,), stats = gradients_of_learning(learner, batch)
    logprobs, _ = token_logprobs(learner.model, batch.tokens, batch.response_mask)
    lengths = batch.response_mask.sum(-1)
    mean_log_w = (logprobs.detach() - batch.sampler_logprobs).sum(-1) / lengths
    w = mean_log_w.exp().clamp(0.5, 2.0)
    assert (w == 0.5).any()
    assert ((w > 0.5) & (w < 2.0)).any()
    advantages = batch.advantages.sum(-1) / lengths
    loss = -(w * advantages * logprobs.sum(-1) / lengths).mean()
    loss.backward()
    gradients = collected_gradients(learner.model)
    squares = [float(g.double().square().sum()) for g in gradients.values()]
    norm = math.sqrt(sum(squares))
    assert norm > 0.01
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, gradient in gradients.items():
        expected = gradient * (0.01 / norm)
        assert (given[name] - expected).norm() <= 1e-3 * expected.norm(), name
    assert stats.loss == pytest.approx(
        float(-(w * advantages).mean()),
        abs=1e-5,
    )
    assert stats.clipped == 0.0
    assert stats.update_log_ratio < 1e-6


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_learning_raises_what_was_rewarded(scheme: str):
    """Contract: learning one batch repeatedly, with the policy's own log-probs as the sampler's,
    raises the log-probs of better completions relative to those of worse ones. Every update steps
    every master and makes a new weight version.
    """
    wide = {"epsilon_high": 10.0, "delta_high": 10.0, "delta_low": 0.99}
    learner = make_learner(scheme, objective=wide, optimizer={"lr": 2e-3})
    batch = batch_of()
    old = learners.logprobs_of(learner, batch)
    batch = dataclasses.replace(batch, sampler_logprobs=old.values)
    before = masters_of(learner)
    first = learner.learn(batch, step=0)
    assert first.updates == 2
    assert first.skipped == 0
    assert first.entropy == pytest.approx(old.entropy, rel=1e-5)
    assert first.mismatch.mean_abs == 0.0
    assert first.mismatch.k3 == 0.0
    stepped = masters_of(learner)
    assert not any(torch.equal(before[name], stepped[name]) for name in stepped)
    for seed in range(1, 4):
        learner.learn(batch, step=seed)
    new = learners.logprobs_of(learner, batch).values
    lengths = batch.response_mask.sum(-1)
    rise = (new - old.values).sum(-1) / lengths
    advantages = batch.advantages.sum(-1) / lengths
    assert (rise * advantages).mean() > 0.05


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_non_finite_gradient_is_skipped(value: float, dtype: torch.dtype):
    """Contract: masters, optimizer state and weight version stay the same, bit for bit.

    Each skip is counted and halves the loss scale (float16 only). The next batch is learned as if
    nothing had happened.
    """
    spoiled = make_learner(dtype=dtype, scale=1024.0)
    clean = make_learner(dtype=dtype, scale=256.0)
    batch = batch_of()
    before = masters_of(spoiled)
    stream = [i.tensor.clone() for i in spoiled.model.low_bit_tensors()]
    handle = poison(spoiled, "model.layers.1.mlp.down_proj.weight", value)
    stats = spoiled.learn(batch, step=0)
    assert stats.updates == 0
    assert stats.skipped == 2
    assert math.isfinite(stats.grad_norm)
    assert all_equal(masters_of(spoiled), before)
    assert all(
        torch.equal(i.tensor, s)
        for i, s in zip(spoiled.model.low_bit_tensors(), stream, strict=True)
    )
    assert (
        stats.loss_scale == spoiled.loss_scale.scale == (256.0 if dtype == torch.float16 else 1.0)
    )
    assert not any(spoiled.state_dict()["moments"].values())
    assert all(p.grad is None for p in spoiled.model.masters.values())
    handle.remove()
    for learner in (spoiled, clean):
        stats = learner.learn(batch, step=1)
        assert stats.updates == 2
        assert stats.skipped == 0
    assert all_equal(masters_of(spoiled), masters_of(clean))
    assert not all_equal(masters_of(spoiled), before)


def test_a_skipped_update_does_not_affect_good_ones():
    """Contract: of three mini-batches with the second one poisoned, two update the masters and one
    is skipped.
    """
    learner = make_learner(mini_batches=3)
    poison(learner, "model.norm.weight", math.inf, only=1)
    before = masters_of(learner)
    stats = learner.learn(batch_of(), step=0)
    assert stats.updates == 2
    assert stats.skipped == 1
    assert not all_equal(masters_of(learner), before)
    assert all(m.isfinite().all() for m in masters_of(learner).values())


@pytest.mark.parametrize(
    ("scheme", "special", "optimizer", "dtype"),
    [
        pytest.param("w4a16", "", "muon", "bfloat16", id="muon in bfloat16"),
        pytest.param("w4a16", "", "adamw", "float16", id="adamw in float16"),
        pytest.param("w8a8", "", "muon", "float16", id="int8 activations"),
        pytest.param("w4a16", "kept scales", "adamw", "bfloat16", id="kept scales"),
        pytest.param("w4a16", "adapters", "muon", "bfloat16", id="adapters by muon"),
        pytest.param("w4a16", "adapters", "adamw", "bfloat16", id="adapters by adamw"),
    ],
)
def test_a_restored_learner_continues_bit_for_bit(
    scheme: str, special: str, optimizer: str, dtype: str
):
    """Contract: learn, save and learn on gives the same as learn, save, load into another learner
    and learn on. Masters, published bytes, statistics and loss scale are equal bit for bit, through
    torch.save and from other initial weights.

    If scales are kept, a batch changes codes and no scale, and the other learner takes over these
    scales. A checkpoint of adapters holds no weight of the base.
    """
    options: dict[str, Any] = {"optimizer": {"name": optimizer, "lr": 1e-2}}
    adapted = special == "adapters"
    compute = COMPUTE_DTYPES[dtype]
    learner, other = (
        make_learner(scheme, compute, seed=0 if adapted else seed, **options) for seed in (0, 5)
    )
    for seed, each in enumerate((learner, other)):
        if special == "kept scales":
            keep_scales(each.model)
        if adapted:
            add_adapters(each.model, LoraConfig(rank=4, alpha=12.0), seed)
    learner, other = (Learner(each.model, each.config) for each in (learner, other))
    learner.loss_scale.growth_every = other.loss_scale.growth_every = 3
    first = stream_bytes(learner.model)
    learner.learn(batch_of(0), step=0)
    changed = {
        name
        for name, tensor in stream_bytes(learner.model).items()
        if not first[name].equal(tensor)
    }
    assert any(name.endswith("weight_scale") for name in changed) != (special == "kept scales")
    assert any(name.endswith(("weight_packed", "weight")) for name in changed)
    assert not all_equal(masters_of(learner), masters_of(other))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    if adapted:
        base_bytes = sum(p.nbytes for p in learner.model.loaded.values())
        assert file.getbuffer().nbytes < base_bytes / 4
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(
        *(learners.logprobs_of(each, batch_of(1)).values for each in (learner, other))
    )
    for seed in (1, 2):
        assert learner.learn(batch_of(seed), step=seed) == other.learn(
            batch_of(seed),
            step=seed,
        )
    assert all_equal(masters_of(learner), masters_of(other))
    assert learner.loss_scale == other.loss_scale
    assert same_stream(learner.model, stream_bytes(other.model))


def test_a_checkpoint_of_kept_scales_is_refused_by_a_run_that_moves_them():
    kept = make_learner("w4a16")
    keep_scales(kept.model)
    with pytest.raises(ConfigError, match="keeps the scales of 14 weights, this run those of 0"):
        make_learner("w4a16").load_state_dict(kept.state_dict())


def test_a_checkpoint_of_other_masters_is_refused_naming_the_first():
    state = make_learner("w4a16").state_dict()
    state["masters"].pop("model.norm.weight")
    with pytest.raises(
        ConfigError,
        match=r"of other masters: 1 differ, the first being 'model\.norm\.weight'",
    ):
        make_learner("w4a16").load_state_dict(state)


def test_the_gate_comes_before_any_update():
    """Contract: the gate receives the batch's mismatch, computed here by hand from the log-probs.

    If it raises, the masters stay the same.
    """
    learner = make_learner()
    batch = batch_of()
    gate = mock.Mock(side_effect=RuntimeError("closed"))
    before = masters_of(learner)
    with pytest.raises(RuntimeError, match="closed"):
        learner.learn(batch, step=0, gate=gate)
    assert all_equal(masters_of(learner), before)
    assert learner.batch_complete
    difference = (learners.logprobs_of(learner, batch).values - batch.sampler_logprobs)[
        batch.response_mask
    ]
    assert gate.call_args.args[0].mean_abs == pytest.approx(
        float(difference.abs().mean()), rel=1e-5
    )
    measured = gate.call_args.args[1]()
    assert 0 < measured.mean_abs < 0.1
    assert all_equal(masters_of(learner), before)


def test_a_batch_without_reward_differences_teaches_nothing():
    """Contract: if rewards are equal in every group, there is no update, skip or weight decay.

    Statistics are numbers, and those of updates are None.
    """
    groups = [dataclasses.replace(g, rewards=(0.5,) * SAMPLES) for g in make_groups()]
    learner = make_learner(optimizer={"weight_decay": 0.5}, diagnostics_every=1)
    before = masters_of(learner)
    stats = learner.learn(make_batch(groups, 0), step=0)
    assert stats.updates == 0
    assert stats.skipped == 0
    assert stats.loss == 0.0
    assert stats.grad_norm == 0.0
    assert stats.update_log_ratio == 0.0
    assert stats.entropy > 0
    assert all_equal(masters_of(learner), before)
    measured = ("lost_updates", "crossed_bfloat16", "flipped_codes", "kl_from_start")
    assert all(stats.records[name] is None for name in measured)
    assert stats.records["ages"] == MismatchByAge()


class AnotherCount(Observer):
    """Counts what `LostUpdates` counts, under a name of its own."""

    counts_changes = True

    def record(self) -> dict[str, Any]:
        """Return the fraction of codes that changed."""
        return {"again": self.learning.flips.share}


def test_several_diagnostics_may_count_changed_codes(monkeypatch: pytest.MonkeyPatch):
    """Contract: each of them gets the same count, whichever is the first in the list."""
    for observers in ((AnotherCount, LostUpdates), (LostUpdates, AnotherCount)):
        monkeypatch.setattr("qarl.learner.learner.OBSERVERS", observers)
        records = make_learner(diagnostics_every=1).learn(batch_of(), 0).records
        assert 0 < records["flipped_codes"] < 1
        assert records["again"] == records["flipped_codes"]


def test_a_kl_penalty_holds_the_policy_near_its_start():
    """Contract: the reference is a separate policy.

    The KL is 0 before the first update, positive after some, and smaller with a large coefficient
    than with a negligible one; the reference's masters do not change.
    tests/learner/test_objectives.py computes each kind by hand.
    """
    batch = batch_of()
    kl = {}
    for coefficient in (1e-6, 100.0):
        reference = make_learner().model
        learner = make_learner(
            mini_batches=1,
            kl={"name": "k3", "coefficient": coefficient},
            reference=reference,
        )
        before = {n: p.detach().clone() for n, p in reference.masters.items()}
        assert learner.learn(batch, step=0).kl == 0.0
        for seed in range(1, 5):
            learner.learn(batch, step=seed)
        with torch.no_grad():
            of_reference, _ = token_logprobs(reference, batch.tokens, batch.response_mask)
        difference = (learners.logprobs_of(learner, batch).values - of_reference)[
            batch.response_mask
        ]
        kl[coefficient] = float(difference.square().mean())
        for name, master in reference.masters.items():
            assert torch.equal(master, before[name]), name
            assert master.grad is None, name
    assert 0 < kl[100.0] < kl[1e-6]


@pytest.mark.parametrize("given_one", [True, False])
def test_a_reference_without_a_penalty_and_a_penalty_without_a_reference_are_refused(
    given_one: bool,
):
    config: dict[str, Any] = {} if given_one else {"kl": {"name": "k3"}}
    with pytest.raises(ConfigError, match=r"learner\.kl\.name is .* reference policy"):
        make_learner(reference=make_learner().model if given_one else None, **config)


@pytest.mark.parametrize("coefficient", [0.0, 10.0])
def test_a_load_balance_loss_with_a_coefficient_falls_and_without_one_is_zero(coefficient: float):
    """Contract: the loss of balanced routers equals the number of experts per token."""
    model = experts_policy(torch.bfloat16)
    settings = {
        "mini_batches": 1,
        "router_aux_loss": coefficient,
        "optimizer": {"lr": 1e-3},
    }
    learner = Learner(model, LearnerConfig.model_validate(settings))
    first, last = (learner.learn(batch_of(), step).load_balance for step in range(2))
    assert first == pytest.approx(model.config.num_experts_per_tok if coefficient else 0.0, rel=0.5)
    assert last < first or not coefficient


def test_a_shadow_forward_takes_ratios_from_the_published_codes():
    """Contract: a plain learner under a W4A16 sampler differs from the sampler's log-probs, which
    are those of the codes, by β. A bypass ratio is therefore not 1 and clips although no update has
    happened. With the shadow forward β is 0 and nothing is clipped in the first update; the
    gradient stays the plain forward's, up to the ratio that weights it.
    """
    bypass = {"name": "none", "ratio_from": "sampler"}
    plain_learner = {"aligned": False, "mini_batches": 1}
    found = {}
    for fix in ("none", "shadow_forward"):
        learner = make_learner(
            **plain_learner,
            objective={"name": "grpo"},
            correction=bypass,
            ratio_fix=fix,
        )
        batch = batch_of()
        with learner.model.forward_as(Forward.PUBLISHED):
            sampler = learners.logprobs_of(learner, batch).values
        batch = dataclasses.replace(batch, sampler_logprobs=sampler)
        found[fix] = gradients_of_learning(learner, batch)
    (plain,), stats = found["none"]
    (shadow,), fixed = found["shadow_forward"]
    assert stats.clipped == stats.phantom_clipped > 0.1
    assert stats.mismatch.mean_abs > 0.01
    assert fixed.clipped == fixed.phantom_clipped == 0.0
    assert fixed.mismatch.mean_abs == 0.0
    assert not all_equal(plain, shadow)
    on_policy = make_learner(
        **plain_learner, objective={"name": "on_policy"}, correction={"name": "none"}
    )
    (expected,), _ = gradients_of_learning(on_policy, batch_of())
    # ratio 1 in value: REINFORCE of the plain forward
    for name, gradient in shadow.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-9, name


def test_half_a_rate_by_warm_up_equals_a_halved_lr():
    """Contract: half of a rate by warm-up gives the same masters as the option `lr` halved."""
    slow, warming = (
        make_learner(optimizer=options)
        for options in ({"lr": 5e-4}, {"lr": 1e-3, "warmup_steps": 2})
    )
    assert [
        slow.learn(batch_of(), 0).lr,
        warming.learn(batch_of(), 0).lr,
    ] == [5e-4] * 2
    assert all_equal(masters_of(warming), masters_of(slow))


FP32: dict[str, Any] = {"dtype": torch.float32}
BYPASS = {"name": "none", "ratio_from": "sampler"}


def forwards_without_gradient(learner: Learner) -> list[int]:
    """Return a list that grows by the number of rows of each forward without gradient."""
    counts: list[int] = []
    compute = learner.scorer.token_logprobs

    def counted(model: Any, rows: Batch, *rest: Any, **how: Any) -> Any:
        if not torch.is_grad_enabled():
            counts.append(len(rows.tokens))
        return compute(model, rows, *rest, **how)

    learner.scorer.token_logprobs = counted
    return counts


@pytest.mark.parametrize(
    ("config", "share"),
    [
        pytest.param({"mini_batches": 1}, 0.0, id="one update needs none"),
        pytest.param({"mini_batches": 2}, 0.5, id="the second update of two"),
        pytest.param({"mini_batches": 3}, 2 / 3, id="the second and third of three"),
        pytest.param(
            {"mini_batches": 3, "correction": {"name": "none", "ratio_from": "sampler"}},
            0.0,
            id="a bypass without a weight",
        ),
        pytest.param(
            {"mini_batches": 2, "correction": {"name": "token_mis", "ratio_from": "sampler"}},
            0.5,
            id="a bypass with a weight",
        ),
        pytest.param(
            {
                "mini_batches": 2,
                "correction": {"name": "none", "ratio_from": "sampler"},
                "diagnostics_every": 1,
            },
            2.0,
            id="a measured step",
        ),
        pytest.param(
            {
                "mini_batches": 2,
                "aligned": False,
                "ratio_fix": "shadow_forward",
                "correction": {"name": "none", "ratio_from": "sampler"},
            },
            2.0,
            id="a shadow forward",
        ),
    ],
)
def test_forwards_without_gradient(config: dict[str, Any], share: float):
    """Contract: only the expected share of the batch's rows is computed without gradient.

    The last group of `make_groups` teaches nothing, so the first trained mini-batch may not be the
    first one. Measured steps score the last mini-batch once more after its update. The first
    measured step also scores the first one, before and after, for the distance from the start.
    """
    learner = make_learner(**FP32, objective={"name": "grpo"}, **config)
    batch = batch_of()
    rows = forwards_without_gradient(learner)
    stats = learner.learn(batch, step=0)
    assert sum(rows) == round(share * len(batch.tokens))
    assert (stats.update_log_ratio is None) == (config.get("correction") == BYPASS and share == 0)


@pytest.mark.parametrize("name", ["tbpo", "grpo", "gspo"])
def test_log_probs_computed_within_updates_equal_those_computed_beforehand(name: str):
    """Contract: with a gate, all log-probs are computed before the update.

    Both orders differ in the last bit at most, because rows are multiplied in other micro-batches;
    fp32 keeps that small.
    """
    beforehand = make_learner(**FP32, objective={"name": name}, optimizer={"lr": 1e-5})
    within = make_learner(**FP32, objective={"name": name}, optimizer={"lr": 1e-5})
    mismatches = []
    first = beforehand.learn(batch_of(), 0, lambda mismatch, _: mismatches.append(mismatch))
    second = within.learn(batch_of(), 0)
    assert mismatches == [first.mismatch]
    for field in (
        "loss",
        "entropy",
        "update_log_ratio",
        "grad_norm",
        "clipped",
        "corrected",
    ):
        assert getattr(second, field) == pytest.approx(
            getattr(first, field),
            rel=1e-3,
            abs=1e-6,
        ), field
    assert vars(second.mismatch) == pytest.approx(
        vars(first.mismatch),
        rel=1e-4,
        abs=1e-5,
    )


def test_reserved_bytes_are_those_of_gradients_and_moments():
    """Contract: the bytes counted before the first step equal those that exist after it.

    Blind spot: no GPU runs this.
    """
    learner = make_learner(optimizer={"name": "muon"})
    counted = step_bytes(learner.model, learner.config)
    with reserved(learner.model, learner.config):
        learner.learn(batch_of(), 0)
    parts = learner.optimizer.state_dict()["moments"].values()
    moments = [tensor for part in parts for tensor in part.values() if tensor.ndim]
    gradients = sum(master.numel() for master in learner.model.masters.values())
    assert counted == 4 * (gradients + sum(t.numel() for t in moments))


def test_reserved_bytes_shrink_with_processes_and_offload():
    learner = make_learner("bf16", optimizer={"name": "adamw"})
    whole = sum(master.numel() for master in learner.model.masters.values()) * 4

    def held(**settings: object) -> int:
        return step_bytes(learner.model, learner.config.model_copy(update=settings))

    assert held() == 3 * whole
    assert held(optimizer=OptimizerConfig(name="adamw", offload="cpu")) == whole
    with one_of_several(0, 4):
        mesh = mesh_of_all(torch.device("cpu"))
        rows = {name: share(master, mesh) for name, master in learner.model.masters.items()}
    learner.model.train_only(rows, ())
    assert held() == pytest.approx(3 * whole / 4, rel=0.02)


@pytest.mark.parametrize(
    ("scheme", "operators"),
    [("bf16", "engine"), ("bf16", "transformers"), ("w4a16", "engine")],
)
def test_an_overflowing_forward_is_an_error(scheme: str, operators: str):
    """Contract: float16 raises before anything is updated and names dtype and remedy; the masters
    do not change. The remedy works: the same masters' log-probs are finite in bfloat16.
    """
    learner, other = (
        make_learner(scheme, dtype, operators=operators)
        for dtype in (torch.float16, torch.bfloat16)
    )
    for each in (learner, other):
        multiply_masters(each.model, 5e4, "model.layers.1.mlp.down_proj.weight")
    before = masters_of(learner)
    with pytest.raises(
        PrecisionError,
        match=r"float16 forward: .* float16 ends at 65504: .*--dtype bfloat16",
    ):
        learner.learn(batch_of(), step=0)
    assert all_equal(masters_of(learner), before)
    assert learners.logprobs_of(other, batch_of()).values.isfinite().all()


def test_log_probs_of_the_engine_that_are_not_finite_are_an_error():
    learner = make_learner()
    batch = batch_of()
    spoiled = batch.sampler_logprobs.clone()
    row, position = batch.response_mask.nonzero()[0].tolist()
    spoiled[row, position] = math.nan
    with pytest.raises(PrecisionError, match="the engine's log-probs of 1 of"):
        learner.learn(dataclasses.replace(batch, sampler_logprobs=spoiled), step=0)


def test_a_loss_scale_too_high_for_float16_is_lowered_until_gradients_fit():
    """Contract: a scale of 2^40 really overflows float16 (no gradient is poisoned), is halved for
    each skip, and then learning begins.
    """
    learner = make_learner("w4a16", torch.float16, scale=2.0**40)
    skipped = updates = 0
    for seed in range(20):
        stats = learner.learn(batch_of(), step=seed)
        skipped += stats.skipped
        updates += stats.updates
        if updates:
            break
    assert skipped > 4
    assert updates
    assert learner.loss_scale.scale == 2.0 ** (40 - skipped) > 1


@pytest.mark.parametrize(
    ("dtype", "skips"), [(torch.float16, 2), (torch.bfloat16, MOST_SKIPPED - 1)]
)
def test_gradients_that_stay_infinite_end_the_run(dtype: torch.dtype, skips: int):
    """Contract: `skips` updates are skipped and counted, the next one raises, and the masters are
    those before all of them. float16 starts with a scale of 4 here, so two halvings reach 1.
    """
    learner = make_learner(dtype=dtype, scale=4.0, mini_batches=1)
    before = masters_of(learner)
    poison(learner, "model.layers.1.mlp.down_proj.weight", math.inf)
    for seed in range(skips):
        assert learner.learn(batch_of(), step=seed).skipped == 1
    with pytest.raises(
        PrecisionError, match=f"{skips + 1}.*masters are those before the first of them"
    ):
        learner.learn(batch_of(), step=9)
    assert all_equal(masters_of(learner), before)


def test_good_updates_between_skips_start_the_count_again_and_a_resumed_run_does_not():
    scale = LossScale(False, 1.0, 1)
    skips = [False] * (MOST_SKIPPED - 1)
    for finite in [*skips, True, *skips]:
        scale.update(finite)
    assert scale.scale == 1.0, "where none is needed, good updates raise none"
    resumed = LossScale(False, 1.0, 1)
    resumed.load_state_dict(scale.state_dict())
    with pytest.raises(PrecisionError, match=f"{MOST_SKIPPED} updates in a row"):
        resumed.update(False)


@pytest.mark.parametrize("how", ["nearest", "stochastic"])
def test_a_float16_master_beyond_its_range_is_an_error(how: str):
    """Contract: 65472 + 100 is infinite in float16 under either rounding, and the error names that
    master only. bfloat16 represents both masters.
    """
    for dtype in (torch.bfloat16, torch.float16):
        masters = {
            "small": nn.Parameter(torch.ones(4, dtype=dtype)),
            "large": nn.Parameter(torch.ones(4, dtype=dtype)),
        }
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
        with pytest.raises(
            PrecisionError, match=r"master 'large' left the range of float16 \(±65504\)"
        ):
            optimizer.step()


def test_a_master_beyond_its_range_is_not_materialized():
    """Contract: the step raises inside `learn`, the stream still holds the previous version, and
    the learner counts as inconsistent.
    """
    learner = make_learner("w4a16", optimizer={"name": "adamw"}, master_dtype="float16")
    for master in learner.model.masters.values():
        master.data = master.data.to(torch.float16)
    # which no configuration has
    steep = learner.config.optimizer.model_copy(update={"lr": 1e5})
    fresh = Learner(learner.model, learner.config.model_copy(update={"optimizer": steep}))
    stream = [item.tensor.clone() for item in learner.model.low_bit_tensors()]
    with pytest.raises(PrecisionError, match="left the range of float16"):
        fresh.learn(batch_of(), step=0)
    assert learner.batch_complete
    assert not fresh.batch_complete
    assert all(
        torch.equal(i.tensor, s)
        for i, s in zip(learner.model.low_bit_tensors(), stream, strict=True)
    )
