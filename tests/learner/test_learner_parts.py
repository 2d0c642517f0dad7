"""The parts of the learner around its loss: advantages, batching, mismatch, loss scale, optimizer."""

import io
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qarl.configs.errors import ConfigError
from qarl.configs.schema.learner import OptimizerConfig
from qarl.learner.batching import Batch, make_batch, micro_batches, mini_batches
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.objectives.advantages import group_advantages
from qarl.learner.optim.loss_scale import LossScale
from qarl.learner.optim.optimizer import MasterOptimizer
from qarl.learner.optim.schedule import Schedule, make_schedule
from qarl.rollout.types import Completion, Group, Prompt


@given(st.integers(1, 6), st.integers(2, 9), st.floats(-50, 50), st.floats(0.01, 20), st.integers(0, 2**32 - 1))
def test_advantages_are_standardized_in_each_group(groups: int, samples: int, shift: float, spread: float, seed: int):
    """Mean 0 and population standard deviation 1 in each group whose rewards differ, zeros in one whose rewards are
    equal; order is kept, and shifting or scaling a group's rewards changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(groups, samples, generator=generator)
    rewards[:, 0] = 1.5  # at least one differs
    rewards[::3] = rewards[::3, :1]
    advantages = group_advantages(rewards)
    assert (advantages[::3] == 0).all()
    for g in range(groups):
        if g % 3:
            assert advantages[g].mean().abs() < 1e-5
            assert advantages[g].std(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)
            assert torch.equal(advantages[g].argsort(stable=True), rewards[g].argsort(stable=True))
    torch.testing.assert_close(group_advantages(rewards * spread + shift)[1::3], advantages[1::3], rtol=0, atol=5e-3)


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 1: mean 1/2, deviation 1/2. Rewards 3, 0, 0: mean 1, deviation √2."""
    assert group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]])).tolist() == [[1.0, -1.0, -1.0, 1.0]]
    root = math.sqrt(2)
    assert group_advantages(torch.tensor([[3.0, 0.0, 0.0]]))[0].tolist() == pytest.approx([root, -1 / root, -1 / root])


@given(st.integers(1, 5), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_estimators_differ_by_what_they_say(groups: int, samples: int, seed: int):
    """dr_grpo is the reward minus the group's mean; rloo minus the mean of the others, computed here sample by sample,
    and S/(S-1) times dr_grpo; grpo is dr_grpo over the deviation. Groups of equal rewards get zeros from all."""
    rewards = torch.rand(groups, samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rewards[::2] = rewards[::2, :1]
    rewards[::2, 0] += (torch.arange(groups)[::2] % 4 == 0).double()
    others = torch.stack([torch.cat([r[:i], r[i + 1 :]]).mean() for r in rewards for i in range(samples)])
    differ = (rewards.max(-1).values > rewards.min(-1).values)[:, None]
    dr_grpo = torch.where(differ, rewards - rewards.mean(-1, keepdim=True), 0.0)
    rloo = torch.where(differ, rewards - others.view_as(rewards), 0.0)
    torch.testing.assert_close(group_advantages(rewards, "dr_grpo"), dr_grpo)
    torch.testing.assert_close(group_advantages(rewards, "rloo"), rloo)
    torch.testing.assert_close(rloo, dr_grpo * samples / (samples - 1))
    deviation = rewards.std(-1, unbiased=False, keepdim=True).where(differ, 1.0)
    torch.testing.assert_close(group_advantages(rewards, "grpo"), dr_grpo / deviation)


def completion(token_ids: Sequence[int], logprobs: Sequence[float]) -> Completion:
    return Completion(tuple(token_ids), tuple(logprobs), "", 0, "stop")


def test_make_batch_by_hand():
    """Two prompts of lengths 3 and 1, two completions each. Position t predicts token t + 1, so a response of n tokens
    after a prompt of p occupies positions p - 1 … p + n - 2."""
    groups = [
        Group(Prompt("a", "", (5, 6, 7)), (completion([8], [-0.5]), completion([9, 10], [-1.0, -2.0])), (1.0, 0.0)),
        Group(Prompt("b", "", (11,)), (completion([12, 13, 14], [-3.0, -4.0, -5.0]), completion([15], [-6.0])), (2, 2)),
    ]
    batch = make_batch(groups, pad_token=99)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 99], [5, 6, 7, 9, 10], [11, 12, 13, 14, 99], [11, 15, 99, 99, 99]]
    assert batch.length.tolist() == [4, 5, 4, 2]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 0], [0, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]
    sampler = [[0, 0, -0.5, 0], [0, 0, -1, -2], [-3, -4, -5, 0], [-6, 0, 0, 0]]
    assert batch.sampler_logprobs.tolist() == sampler and batch.sampler_logprobs.dtype == torch.float32
    assert batch.advantages.tolist() == [[0, 0, 1, 0], [0, 0, -1, -1], [0] * 4, [0] * 4]
    assert batch.group.tolist() == [0, 0, 1, 1]
    rows = batch.rows(torch.tensor([2, 0]))
    assert rows.tokens.tolist() == [[11, 12, 13, 14], [5, 6, 7, 8]]
    assert rows.response_mask.int().tolist() == [[1, 1, 1], [0, 0, 1]]
    assert rows.sampler_logprobs.tolist() == [[-3, -4, -5], [0, 0, -0.5]]
    assert rows.advantages.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert rows.group.tolist() == [1, 0] and rows.length.tolist() == [4, 4]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """1–8 prompts with 2–5 completions each, all lengths uneven."""
    samples = draw(st.integers(2, 5))
    groups = []
    for g in range(draw(st.integers(1, 8))):
        prompt = Prompt(str(g), "", tuple(range(1, 1 + draw(st.integers(1, 12)))))
        lengths = draw(st.lists(st.integers(1, 20), min_size=samples, max_size=samples))
        completions = tuple(completion(range(n), [-0.1 - k for k in range(n)]) for n in lengths)
        groups.append(Group(prompt, completions, tuple(float(n) for n in lengths)))
    return make_batch(groups, pad_token=0)


@given(batches(), st.integers(1, 9), st.integers(0, 2**31))
def test_mini_batches_partition_whole_groups(batch: Batch, count: int, seed: int):
    """Contract: every row in exactly one mini-batch, a group never split, group counts differing by at most one,
    never more mini-batches than groups; the same seed gives the same cut."""
    cut = mini_batches(batch, count, seed)
    groups = int(batch.group.max()) + 1
    assert len(cut) == min(count, groups)
    assert sorted(torch.cat(cut).tolist()) == list(range(len(batch.tokens)))
    held = [set(batch.group[index].tolist()) for index in cut]
    assert sum(len(h) for h in held) == groups
    assert max(len(h) for h in held) - min(len(h) for h in held) <= 1
    assert all(torch.equal(a, b) for a, b in zip(cut, mini_batches(batch, count, seed), strict=True))


def test_mini_batches_are_shuffled_by_their_seed():
    groups = [Group(Prompt(str(g), "", (1,)), (completion([2], [0.0]),) * 2, (0.0, 1.0)) for g in range(12)]
    batch = make_batch(groups, 0)
    firsts = {tuple(mini_batches(batch, 4, seed)[0].tolist()) for seed in range(20)}
    assert len(firsts) > 10


@given(batches(), st.integers(1, 200), st.data())
def test_micro_batches_cover_rows_within_the_token_budget(batch: Batch, budget: int, data: st.DataObject):
    """Contract: each given row exactly once; rows · longest ≤ budget, except that a row longer than the budget goes
    alone; and no cut is needless: one more row would have exceeded the budget."""
    index = torch.tensor(data.draw(st.permutations(range(len(batch.tokens)))))
    index = index[: data.draw(st.integers(1, len(index)))]
    parts = list(micro_batches(batch, index, budget))
    assert sorted(torch.cat(parts).tolist()) == sorted(index.tolist())
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        longest = int(batch.length[part].max())
        assert len(part) * longest <= budget or len(part) == 1
        assert batch.rows(part).tokens.shape == (len(part), longest)
        assert following is None or (len(part) + 1) * longest > budget


def test_mismatch_by_hand():
    """Differences 0.1, -0.3 | 0.2 (learner - sampler), padding ignored: mean |d| = 0.2, max 0.3, k3 = mean(e^d-1-d),
    log weights -0.1 and 0.2."""
    response_mask = torch.tensor([[True, True, False], [False, True, False]])
    sampler = torch.tensor([[-1.0, -2.0, -9.0], [-7.0, -0.5, 4.0]])
    learner = torch.tensor([[-0.9, -2.3, 0.0], [0.0, -0.3, 0.0]])
    found = measure_mismatch(learner, sampler, response_mask)
    k3 = sum(math.expm1(d) - d for d in (0.1, -0.3, 0.2)) / 3
    expected = (0.2, 0.3, k3, 0.05, 0.15, -0.1, 0.2)
    assert (
        found.mean_abs,
        found.max_abs,
        found.k3,
        found.mean_log_w,
        found.mean_abs_log_w,
        found.log_w_low,
        found.log_w_high,
    ) == pytest.approx(expected, abs=1e-6)
    assert (found.mean, found.std, found.off_10, found.off_50) == pytest.approx(
        (0, math.sqrt(0.14 / 3), 1, 0), abs=1e-6
    )
    assert (found.advantage_correlation, found.end_mean_abs) == (None, None)


def test_where_a_mismatch_is_by_hand():
    """Two responses, d = 0, 0.1, 0.2, 0.3 and 0.4, 0.3: |d| over the places 1 2 3 4 | 1 2, of which the first ends with
    its end token and one token is rare. Sums 0.6 and 0.7 over the lengths 4 and 2; d with A = 1 and -1."""
    response_mask = torch.tensor([[True] * 4, [True, True, False, False]])
    difference = torch.tensor([[0.0, 0.1, 0.2, 0.3], [0.4, 0.3, 9.0, 9.0]])
    sampler = torch.tensor([[-1.0, -2.0, -4.7, -1.0], [-4.5, -1.0, -9.0, -9.0]])
    advantages = torch.tensor([[1.0] * 4, [-1.0, -1.0, 0.0, 0.0]])
    ended = torch.tensor([True, False])
    found = measure_mismatch(sampler + difference, sampler, response_mask, advantages, ended)
    d, position, a = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.3]), [1, 2, 3, 4, 1, 2], [1, 1, 1, 1, -1, -1]
    assert found.advantage_correlation == pytest.approx(np.corrcoef(d, a)[0, 1], abs=1e-6)
    assert (found.rare_mean_abs, found.end_mean_abs) == pytest.approx((0.2, 0.3), abs=1e-6)
    assert found.position_slope == pytest.approx(np.polyfit(position, d, 1)[0], abs=1e-6)
    assert found.length_slope == pytest.approx(-0.05, abs=1e-6)
    same = measure_mismatch(sampler, sampler, response_mask, advantages, ended)
    assert same.advantage_correlation is None and (same.position_slope, same.length_slope) == (0.0, 0.0)


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0, 3), st.integers(0, 2**32 - 1))
def test_k3_is_never_negative_and_zero_only_for_equal_policies(B: int, T: int, spread: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    sampler = -torch.rand(B, T, generator=generator) * 5
    learner = sampler + torch.randn(B, T, generator=generator) * spread
    response_mask = torch.rand(B, T, generator=generator) < 0.7
    response_mask[0, 0] = True
    found = measure_mismatch(learner, sampler, response_mask)
    assert found.k3 >= 0 and found.max_abs >= found.mean_abs and found.log_w_low <= found.log_w_high
    assert (found.k3 > 0) == bool((learner != sampler)[response_mask].any())
    same = measure_mismatch(sampler, sampler, response_mask)
    assert (same.k3, same.mean_abs, same.max_abs, same.mean_abs_log_w) == (0.0, 0.0, 0.0, 0.0)


def test_loss_scale_doubles_after_good_steps_and_halves_after_a_bad_one():
    """growth_every = 3: three good steps in a row double it, a bad one halves it and starts the count again; it never
    goes below one; a restored one continues the count."""
    scale = LossScale(True, 8.0, 3)
    seen = []
    for finite in (True, True, True, True, True, False, True, True, True):
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 16, 16, 16, 8, 8, 8, 16]
    scale.update(True)
    restored = LossScale(True, 1.0, 3)
    restored.load_state_dict(scale.state_dict())
    restored.update(True)
    assert restored.scale == 16
    restored.update(True)
    assert restored.scale == 32
    for _ in range(5):
        restored.update(False)
    assert restored.scale == 1.0


def test_loss_scale_is_one_where_it_is_not_needed():
    scale = LossScale(False, 65536.0, 1)
    for finite in (True, False, True):
        scale.update(finite)
        assert scale.scale == 1.0


SHAPES = {"embed": (11, 6), "up": (8, 6), "square": (6, 6), "norm": (6,), "head": (11, 6)}
MATRICES = {"up", "square", "norm"}  # norm is no matrix, whatever the name list says


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(masters: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in masters.values():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_muon_takes_linear_matrices_and_adamw_the_rest(name: str):
    """Contract: after three steps each master is bit for bit where torch's own Muon (matrices of linear layers) or
    AdamW (embeddings, heads, norms) puts it, at the configured rate times the step's factor."""
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.02, "weight_decay": 0.1, "momentum": 0.8})
    masters, expected = parameters(), parameters()
    ours = MasterOptimizer(masters, MATRICES, config)
    by_muon = ["up", "square"] if name == "muon" else []
    adamw = torch.optim.AdamW(
        [p for n, p in expected.items() if n not in by_muon], 0.02, config.betas, weight_decay=0.1, fused=True
    )
    theirs: list[torch.optim.Optimizer] = [adamw]
    if by_muon:
        matrices = [expected[n] for n in by_muon]
        theirs.append(torch.optim.Muon(matrices, 0.02, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw"))
    for step, factor in enumerate((0.5, 1.0, 0.25)):
        give_gradients(masters, step)
        give_gradients(expected, step)
        ours.lr = 0.02 * factor
        ours.step()
        for optimizer in theirs:
            optimizer.param_groups[0]["lr"] = 0.02 * factor
            optimizer.step()
    for key, master in masters.items():
        assert torch.equal(master, expected[key]), key
        assert not torch.equal(master, parameters()[key])
    swapped = parameters()
    other = MasterOptimizer(swapped, MATRICES, config.model_copy(update={"name": "adamw" if by_muon else "muon"}))
    give_gradients(swapped, 0)
    other.step()
    give_gradients(again := parameters(), 0)
    MasterOptimizer(again, MATRICES, config).step()
    assert [k for k in SHAPES if not torch.equal(swapped[k], again[k])] == ["up", "square"]


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_restored_optimizer_continues_bit_for_bit(name: str):
    """Two steps, save, load into a new optimizer, two more: as four without a break. One started without the state
    ends elsewhere, so the state matters."""
    config = OptimizerConfig.model_validate({"name": name, "lr": 0.02})
    masters = parameters()
    optimizer = MasterOptimizer(masters, MATRICES, config)
    for step in range(2):
        give_gradients(masters, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"masters": {k: p.detach() for k, p in masters.items()}, "optimizer": optimizer.state_dict()}, file)

    def resumed(with_state: bool) -> tuple[dict[str, nn.Parameter], MasterOptimizer]:
        file.seek(0)
        saved = torch.load(file)
        others = {k: nn.Parameter(v) for k, v in saved["masters"].items()}
        other = MasterOptimizer(others, MATRICES, config)
        if with_state:
            other.load_state_dict(saved["optimizer"])
        return others, other

    restored, fresh = resumed(True), resumed(False)
    for step in (2, 3):
        for params, stepper in ((masters, optimizer), restored, fresh):
            give_gradients(params, step)
            stepper.step()
    for key in SHAPES:
        assert torch.equal(masters[key], restored[0][key])
        assert not torch.equal(masters[key], fresh[0][key])


def test_gradient_norm_scaling_and_dropping():
    """The norm is global over all masters (3, 4 and 12: 13), skips masters without gradient, and is non-finite where
    any gradient is. Gradients of float16 masters are fp32: a norm of 90000, beyond float16, does not overflow."""
    masters = {k: nn.Parameter(torch.zeros(2, 2)) for k in "abcd"}
    optimizer = MasterOptimizer(masters, {"a"}, OptimizerConfig())
    assert optimizer.gradient_norm() == 0.0
    for key, value in (("a", 3.0), ("b", 4.0), ("c", 12.0)):
        masters[key].grad = torch.tensor([[0.0, value], [0.0, 0.0]])
    assert optimizer.gradient_norm() == pytest.approx(13.0)
    optimizer.scale_gradients(0.5)
    assert optimizer.gradient_norm() == pytest.approx(6.5) and masters["d"].grad is None
    for bad in (math.inf, -math.inf, math.nan):
        masters["b"].grad = torch.tensor([[0.0, 1.0], [bad, 0.0]])
        assert not math.isfinite(optimizer.gradient_norm())
    optimizer.zero_grad()
    assert all(p.grad is None for p in masters.values())
    narrow = {"a": nn.Parameter(torch.zeros(300, 300, dtype=torch.float16))}
    optimizer = MasterOptimizer(narrow, set(), OptimizerConfig())
    (narrow["a"] * torch.full((300, 300), 300.0)).sum().backward()
    assert optimizer.gradient_norm() == pytest.approx(90000.0, rel=1e-3)


def test_the_learning_rate_rises_holds_and_falls():
    """10 steps, 4 of warm-up, 2 of decay: 1/4, 2/4, 3/4, 1, then 1, and over the last two 1, 1/2; without either 1."""
    assert [Schedule(1.0, 4, 2, 10).rate(s) for s in range(10)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.5]
    assert [Schedule(3e-4, 0, 0, 3).rate(s) for s in range(3)] == [3e-4] * 3
    assert [Schedule(1.0, 4, 4, 4).rate(s) for s in range(4)] == [0.25, 0.5, 0.5, 0.25]
    assert [Schedule(1.0, 0, 100, 4).rate(s) for s in range(4)] == [1, 0.75, 0.5, 0.25], "a short run begins at lr too"
    assert [Schedule(1.0, 2, 0, None).rate(s) for s in (0, 1, 10**6)] == [0.5, 1, 1]
    with pytest.raises(ConfigError, match=r"decay_steps is 3.*how many steps"):
        make_schedule(OptimizerConfig(decay_steps=3), None)
