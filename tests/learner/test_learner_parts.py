"""Tests of the parts of the learner around its loss: advantages, batching, mismatch, loss scale,
schedule.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qarl.configs.errors import ConfigError, PolicyError
from qarl.configs.schema.learner import LearnerConfig, OptimizerConfig
from qarl.configs.schema.lora import LoraConfig
from qarl.learner.batching import Batch, make_batch, micro_batches, mini_batches
from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.learner.load_balance import load_balance_coefficient
from qarl.learner.logprobs import _in_chunks
from qarl.learner.loss.tokens import clip_reasons, clipped_sides
from qarl.learner.mismatch import measure_mismatch
from qarl.learner.objectives.advantages import group_advantages
from qarl.learner.optim.loss_scale import LossScale
from qarl.learner.optim.schedule import Schedule, make_schedule
from qarl.learner.optim.sharded import masters_mesh
from qarl.learner.processes import Processes
from qarl.learner.scorer import Scorer
from qarl.rollout.types import Completion, EmbeddedPictures, Group, Prompt
from tests.support.one_of_several import one_of_several
from tests.support.tensors import pairwise_equal, seeded


@given(
    st.integers(1, 5),
    st.integers(2, 9),
    st.integers(0, 2**32 - 1),
)
def test_advantage_estimators_have_their_defining_formulas(groups: int, samples: int, seed: int):
    """Contract: dr_grpo is the reward minus the group's mean. rloo is the reward minus the mean of
    the other samples, computed here sample by sample, and S/(S-1) times dr_grpo. grpo is dr_grpo
    over the deviation. Groups of equal rewards get zeros from all.
    """
    rewards = torch.rand(
        groups,
        samples,
        generator=seeded(seed),
        dtype=torch.float64,
    )
    rewards[::2] = rewards[::2, :1]
    every_fourth = torch.arange(groups)[::2] % 4 == 0
    rewards[::2, 0] += every_fourth.double()
    others = torch.stack(
        [row[torch.arange(samples) != i].mean() for row in rewards for i in range(samples)]
    )
    highest = rewards.amax(-1, keepdim=True)
    differ = highest > rewards.amin(-1, keepdim=True)
    dr_grpo = torch.where(differ, rewards - rewards.mean(-1, keepdim=True), 0.0)
    rloo = torch.where(differ, rewards - others.view_as(rewards), 0.0)
    torch.testing.assert_close(group_advantages(rewards, "dr_grpo"), dr_grpo)
    torch.testing.assert_close(group_advantages(rewards, "rloo"), rloo)
    torch.testing.assert_close(rloo, dr_grpo * samples / (samples - 1))
    deviation = rewards.std(-1, unbiased=False, keepdim=True).where(differ, 1.0)
    torch.testing.assert_close(group_advantages(rewards, "grpo"), dr_grpo / deviation)


def test_groups_of_different_sizes_get_advantages_from_their_own_mean():
    answers = [completion([8], [-0.5])] * 3
    groups = [
        Group(Prompt("", "", (5,)), tuple(answers[: len(r)]), r)
        for r in ((1.0, 0.0), (1.0, 0.0, 0.0))
    ]
    advantages = make_batch(groups, 0, "dr_grpo").advantages.flatten().tolist()
    assert advantages == pytest.approx([0.5, -0.5, 2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 0.7])
def test_equal_rewards_that_are_no_binary_fractions_teach_nothing(reward: float):
    """Contract: equal rewards give no advantage although their mean, and so their deviation, is off
    by a last bit.
    """
    for samples in range(2, 17):
        rewards = torch.full((1, samples), reward)
        assert not group_advantages(rewards, "grpo").any()


def completion(token_ids: Sequence[int], logprobs: Sequence[float]) -> Completion:
    return Completion(tuple(token_ids), tuple(logprobs), "", 0, "stop")


def test_make_batch_by_hand():
    """Contract: position t predicts token t + 1, so a response of n tokens after a prompt of p
    occupies positions p - 1 … p + n - 2. Here are two prompts of lengths 3 and 1 with two
    completions each.
    """
    groups = [
        Group(
            Prompt("a", "", (5, 6, 7)),
            (
                completion([8], [-0.5]),
                completion([9, 10], [-1.0, -2.0]),
            ),
            (1.0, 0.0),
        ),
        Group(
            Prompt("b", "", (11,)),
            (
                completion([12, 13, 14], [-3.0, -4.0, -5.0]),
                completion([15], [-6.0]),
            ),
            (2, 2),
        ),
    ]
    batch = make_batch(groups, pad_token=99)
    assert batch.tokens.tolist() == [
        [5, 6, 7, 8, 99],
        [5, 6, 7, 9, 10],
        [11, 12, 13, 14, 99],
        [11, 15, 99, 99, 99],
    ]
    assert batch.length.tolist() == [4, 5, 4, 2]
    assert batch.response_mask.int().tolist() == [
        [0, 0, 1, 0],
        [0, 0, 1, 1],
        [1, 1, 1, 0],
        [1, 0, 0, 0],
    ]
    sampler = [
        [0, 0, -0.5, 0],
        [0, 0, -1, -2],
        [-3, -4, -5, 0],
        [-6, 0, 0, 0],
    ]
    assert batch.sampler_logprobs.tolist() == sampler
    assert batch.sampler_logprobs.dtype == torch.float32
    assert batch.advantages.tolist() == [
        [0, 0, 1, 0],
        [0, 0, -1, -1],
        [0] * 4,
        [0] * 4,
    ]
    assert batch.group.tolist() == [0, 0, 1, 1]
    rows = batch.rows(torch.tensor([2, 0]))
    assert rows.tokens.tolist() == [
        [11, 12, 13, 14],
        [5, 6, 7, 8],
    ]
    assert rows.response_mask.int().tolist() == [
        [1, 1, 1],
        [0, 0, 1],
    ]
    assert rows.sampler_logprobs.tolist() == [
        [-3, -4, -5],
        [0, 0, -0.5],
    ]
    assert rows.advantages.tolist() == [
        [0, 0, 0],
        [0, 0, 1],
    ]
    assert rows.group.tolist() == [1, 0]
    assert rows.length.tolist() == [4, 4]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw a batch of 1–8 prompts with 2–5 completions each, all of uneven lengths."""
    samples = draw(st.integers(2, 5))
    groups = []
    for g in range(draw(st.integers(1, 8))):
        prompt = Prompt(
            str(g),
            "",
            tuple(range(1, 1 + draw(st.integers(1, 12)))),
        )
        lengths = draw(st.lists(st.integers(1, 20), min_size=samples, max_size=samples))
        logprobs = [[-0.1 - k for k in range(n)] for n in lengths]
        completions = tuple(completion(range(len(row)), row) for row in logprobs)
        groups.append(Group(prompt, completions, tuple(float(n) for n in lengths)))
    return make_batch(groups, pad_token=0)


@given(
    batches(),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_mini_batches_partition_whole_groups(batch: Batch, count: int, seed: int):
    """Contract: every row is in exactly one mini-batch, no group is split, group counts differ by
    at most one, and there are at most as many mini-batches as groups. The same seed gives the same
    cut.
    """
    cut = mini_batches(batch, count, seed)
    groups = int(batch.group.max()) + 1
    assert len(cut) == min(count, groups)
    assert sorted(torch.cat(cut).tolist()) == list(range(len(batch.tokens)))
    held = [set(batch.group[index].tolist()) for index in cut]
    assert sum(len(h) for h in held) == groups
    assert max(len(h) for h in held) - min(len(h) for h in held) <= 1
    assert pairwise_equal(cut, mini_batches(batch, count, seed))


def test_tokens_after_a_picture_count_on_from_its_largest_position():
    """Contract: on all three axes, also in padding; a prompt of text counts its tokens."""
    # two tokens of text, a picture of two rows and three columns, one token of text
    axes = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    seen = EmbeddedPictures(
        rows=torch.ones(6, 4), places=torch.arange(2, 8), positions=torch.tensor(axes).T
    )
    plain = completion([7, 8], [-1.0, -1.0])
    with_picture = replace(plain, pictures=seen)
    groups = [
        Group(Prompt("a", "", tuple(range(9))), (with_picture, with_picture), (0.0, 1.0)),
        Group(Prompt("b", "", tuple(range(10))), (plain,), (0.0,)),
    ]
    batch = make_batch(groups)
    assert batch.picture_positions is not None
    expected = [[*axis, 6, 7, 8] for axis in axes]
    assert batch.picture_positions[:2].transpose(1, 2).tolist() == [expected] * 2
    assert batch.picture_positions[2].T.tolist() == [list(range(12))] * 3
    few = batch.rows(torch.tensor([1]))
    assert few.pictures is not None
    in_row = few.pictures.of(few.real()).positions
    assert in_row is not None
    assert in_row.T.tolist() == [axis[:11] for axis in expected]
    assert make_batch(groups[1:]).picture_positions is None


def test_mini_batches_are_shuffled_by_their_seed():
    pair = (completion([2], [0.0]),) * 2
    prompts = [Prompt(str(g), "", (1,)) for g in range(12)]
    groups = [Group(prompt, pair, (0.0, 1.0)) for prompt in prompts]
    batch = make_batch(groups, 0)
    first_rows = [mini_batches(batch, 4, seed)[0] for seed in range(20)]
    firsts = {tuple(rows.tolist()) for rows in first_rows}
    assert len(firsts) > 10


@pytest.mark.parametrize("how", ["padded", "packed", "sharing prompts"])
@given(batches(), st.integers(1, 200), st.data())
def test_micro_batches_cover_rows_within_the_token_budget(
    how: str, batch: Batch, budget: int, data: st.DataObject
):
    """Contract: each given row appears exactly once.

    A micro-batch's size is rows · longest if padded, its tokens if packed, and its tokens without
    repeated prompts if prompts are shared. It is ≤ budget unless one row alone is longer, and one
    more row would exceed the budget.
    """
    packed = how != "padded"
    sharing = how == "sharing prompts"

    def size(rows: torch.Tensor) -> int:
        if sharing:
            return int(batch.rows(rows).packed(share_prompts=True).kept.sum())
        lengths = batch.length[rows]
        return int(lengths.sum() if packed else len(rows) * lengths.max())

    index = torch.tensor(data.draw(st.permutations(range(len(batch.tokens)))))
    index = index[: data.draw(st.integers(1, len(index)))]
    parts = list(micro_batches(batch, index, budget, packed, sharing))
    assert sorted(torch.cat(parts).tolist()) == sorted(index.tolist())
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert size(part) <= budget or len(part) == 1
        assert batch.rows(part).tokens.shape == (
            len(part),
            int(batch.length[part].max()),
        )
        assert following is None or size(torch.cat([part, following[:1]])) > budget


def test_mismatch_by_hand():
    """Contract: statistics of d = learner - sampler = 0.1, -0.3 | 0.2 without padding are mean |d|
    0.2, max 0.3, and log weights -0.1 and 0.2 per sequence.
    """
    response_mask = torch.tensor([[True, True, False], [False, True, False]])
    sampler = torch.tensor(
        [
            [-1.0, -2.0, -9.0],
            [-7.0, -0.5, 4.0],
        ]
    )
    learner = torch.tensor(
        [
            [-0.9, -2.3, 0.0],
            [0.0, -0.3, 0.0],
        ]
    )
    found = measure_mismatch(learner, sampler, response_mask)
    k3 = sum(math.expm1(d) - d for d in (0.1, -0.3, 0.2)) / 3
    names = (
        "mean_abs max_abs k3 mean_log_w mean_abs_log_w log_w_low log_w_high mean std off_10 off_50"
    )
    expected = [
        0.2,
        0.3,
        k3,
        0.05,
        0.15,
        -0.1,
        0.2,
        0,
        math.sqrt(0.14 / 3),
        1,
        0,
    ]
    assert [getattr(found, name) for name in names.split()] == pytest.approx(
        expected,
        abs=1e-6,
    )
    assert found.advantage_correlation is None
    assert found.end_mean_abs is None


def test_mismatch_by_position_length_and_advantage_by_hand():
    """Contract: |d| is related to position, length and advantage.

    Two responses have d = 0, 0.1, 0.2, 0.3 and 0.4, 0.3 at positions 1 2 3 4 | 1 2, with A = 1 and
    -1. The first ends with its end token; one token of each is rare. Sums 0.6 and 0.7 over lengths
    4 and 2 give a length slope of -0.05.
    """
    response_mask = torch.tensor([[True] * 4, [True, True, False, False]])
    difference = torch.tensor(
        [
            [0.0, 0.1, 0.2, 0.3],
            [0.4, 0.3, 9.0, 9.0],
        ]
    )
    sampler = torch.tensor(
        [
            [-1.0, -2.0, -4.7, -1.0],
            [-4.5, -1.0, -9.0, -9.0],
        ]
    )
    advantages = torch.tensor(
        [
            [1.0] * 4,
            [-1.0, -1.0, 0.0, 0.0],
        ]
    )
    ended = torch.tensor([True, False])
    found = measure_mismatch(sampler + difference, sampler, response_mask, advantages, ended)
    d = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.3])
    position = [1, 2, 3, 4, 1, 2]
    a = [1, 1, 1, 1, -1, -1]
    assert found.advantage_correlation == pytest.approx(
        np.corrcoef(d, a)[0, 1],
        abs=1e-6,
    )
    assert (found.rare_mean_abs, found.end_mean_abs) == pytest.approx((0.2, 0.3), abs=1e-6)
    assert found.position_slope == pytest.approx(
        np.polyfit(position, d, 1)[0],
        abs=1e-6,
    )
    assert found.length_slope == pytest.approx(-0.05, abs=1e-6)
    same = measure_mismatch(sampler, sampler, response_mask, advantages, ended)
    assert same.advantage_correlation is None
    assert same.position_slope == 0.0
    assert same.length_slope == 0.0


def test_clip_reasons_by_hand():
    """Contract: the reason is given by the advantage's sign and the side of the bound (for a
    sequence ratio: of its mean), otherwise by the correction.
    """
    log_ratio = torch.tensor([[0.1, -0.1, 0.1, -0.1, 0.1, 0.1, 0.1]])
    clipped = torch.tensor([[True, True, True, True, True, False, True]])
    advantages = torch.tensor([[1.0, 1, -1, -1, 0, 1, 1]])
    response = torch.arange(7)[None] < 6
    reasons = clip_reasons(log_ratio, clipped, ~clipped, advantages, response)
    expected = [
        "A > 0 above",
        "A > 0 below",
        "A < 0 above",
        "A < 0 below",
        "none",
        "corrected",
        "none",
    ]
    assert [CLIP_REASONS[place] for place in reasons[0]] == expected
    assert [side.nonzero()[:, 1].tolist() for side in clipped_sides(reasons)] == [
        [0],
        [2],
        [3],
    ]
    shared = (
        torch.tensor([[0.3, -0.1], [-0.3, 0.1]]),
        torch.tensor([[True], [True]]),
        torch.zeros(2, 1).bool(),
    )
    reasons = clip_reasons(
        *shared,
        torch.tensor(
            [
                [-1.0],
                [1.0],
            ]
        ).expand(2, 2),
        torch.ones(2, 2).bool(),
    )
    assert [CLIP_REASONS[place] for place in reasons[:, 1]] == [
        "sequence, A < 0 above",
        "sequence, A > 0 below",
    ]
    assert [int(side.sum()) for side in clipped_sides(reasons)] == [0, 2, 0]


@given(st.integers(0, 40), st.integers(1, 9))
def test_processes_share_all_items_in_nearly_equal_parts(count: int, world: int):
    shares = [list(Processes(rank, world).span(count)) for rank in range(world)]
    assert [*itertools.chain(*shares)] == list(range(count))
    assert len(shares[-1]) - min(map(len, shares)) <= 1
    items = list(range(count))
    assert [Processes(rank, world).share(items) for rank in range(world)] == shares


@given(batches(), st.integers(1, 5), st.integers(1, 60))
def test_micro_batches_are_dealt_out_to_processes(batch: Batch, world: int, budget: int):
    """Contract: every process gets equally many micro-batches; together they are those of one
    process, and repeats that fill up the last round do not count. Every process calls the head
    equally often.
    """
    config = LearnerConfig(micro_batch_tokens=budget, logprob_chunk_tokens=7, packing=False)
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    rows = torch.arange(len(batch.tokens))
    scorers = [Scorer(model, config, Processes(rank, world), 1.0) for rank in range(world)]
    turns = list(
        zip(
            *(scorer.micro_batches(batch, rows) for scorer in scorers),
            strict=True,
        )
    )
    counted = [part.index.tolist() for turn in turns for part in turn if not part.is_dummy]
    assert counted == [part.tolist() for part in micro_batches(batch, rows, budget)]
    for turn in turns if world > 1 else ():
        most = max(int(batch.response_mask[part.index].sum()) for part in turn)
        assert [part.chunks for part in turn] == [math.ceil(most / 7)] * world


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
def test_positions_are_cut_into_the_agreed_number_of_chunks(chunks: int):
    """Contract: if there are too few positions, the first one is repeated after all others."""
    hidden = torch.arange(6.0).view(3, 2)
    targets = torch.tensor([5, 6, 7])
    parts = _in_chunks(hidden, targets, 2, chunks)
    repeated = max(0, chunks - 3)
    assert len(parts) == chunks
    chosen = torch.cat([targets for _, targets in parts])
    assert chosen.tolist() == [5, 6, 7] + [5] * repeated
    assert torch.equal(
        torch.cat([x for x, _ in parts]),
        torch.cat([hidden, hidden[:1].repeat(repeated, 1)]),
    )


@pytest.mark.parametrize(
    ("setting", "own", "switched_on", "expected"),
    [
        pytest.param(None, 0.01, True, 0.01, id="own coefficient"),
        pytest.param(0.5, 0.01, False, 0.5, id="setting before own coefficient"),
        pytest.param(None, 0.01, False, 0.0, id="own coefficient switched off"),
        pytest.param(None, None, True, 0.0, id="no coefficient"),
    ],
)
def test_load_balance_coefficient_of_a_mixture(
    setting: float | None, own: float | None, switched_on: bool, expected: float
):
    """Contract: the setting wins. Without a setting the model's own coefficient holds if the
    model's configuration switches the loss on.
    """
    assert load_balance_coefficient(balanced_model(1, own, switched_on), setting) == expected


@pytest.mark.parametrize(("setting", "own"), [(0.0, None), (None, 0.01)])
def test_load_balance_coefficient_of_a_dense_model_is_zero(
    setting: float | None, own: float | None
):
    assert load_balance_coefficient(balanced_model(0, own), setting) == 0.0


@pytest.mark.parametrize(("experts", "own"), [(0, 0.01), (1, None)])
def test_a_load_balance_loss_for_a_model_without_one_is_refused(experts: int, own: float | None):
    with pytest.raises(ConfigError, match="has no load-balance loss"):
        load_balance_coefficient(balanced_model(experts, own), 0.5)


def balanced_model(experts: int, own: float | None, switched_on: bool = True) -> Any:
    """Return a stand-in for a model with this many layers of experts and its own coefficient."""
    config = SimpleNamespace(
        model_type="m",
        router_aux_loss_coef=own,
        output_router_logits=switched_on,
    )
    return SimpleNamespace(config=config, experts=[None] * experts)


def test_several_processes_share_the_masters_unless_these_are_on_the_host():
    frozen = LearnerConfig(lora=LoraConfig(base="host"))
    with one_of_several(1, 4):
        mesh = masters_mesh(LearnerConfig(), Processes(1, 4))
        assert mesh is not None
        assert mesh.size() == 4
        assert masters_mesh(frozen, Processes(1, 4)) is None
    assert masters_mesh(LearnerConfig(), Processes()) is None


@pytest.mark.parametrize(
    ("rewards", "logprobs"),
    [
        ((1.0,), 2),
        ((1.0, math.nan), 2),
        ((1.0, 0.0), 1),
    ],
)
def test_missing_or_non_finite_rewards_and_log_probs_are_refused(rewards: Any, logprobs: int):
    answer = Completion((1, 2), (-0.5,) * logprobs, "", 0, "stop")
    with pytest.raises(
        PolicyError,
        match=r"must (be a finite number for each of 2|have a log-prob for each)",
    ):
        make_batch([Group(Prompt("", "", (1,)), (answer, answer), rewards)])


def test_loss_scale_doubles_after_good_steps_and_halves_after_a_bad_one():
    """Contract: with growth_every = 3, three good steps in a row double the scale, and a bad one
    halves it and restarts the count. The scale never falls below one, and a restored scale
    continues the count.
    """
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


def test_the_learning_rate_rises_holds_and_falls():
    """Contract: of 10 steps with 4 of warm-up and 2 of decay, the rates are 1/4, 2/4, 3/4, 1, then
    1, and 1, 1/2 over the last two. Without warm-up and decay the rate is constant.
    """

    def rates(schedule: Schedule, steps: Iterable[int]) -> list[float]:
        return [schedule.rate(step) for step in steps]

    rising = [0.25, 0.5, 0.75]
    both_ends = rates(Schedule(1.0, 4, 2, 10), range(10))
    assert both_ends == [*rising, *[1] * 6, 0.5]
    assert rates(Schedule(3e-4, 0, 0, 3), range(3)) == [3e-4] * 3
    assert rates(Schedule(1.0, 4, 4, 4), range(4)) == [0.25, 0.5, 0.5, 0.25]
    short = rates(Schedule(1.0, 0, 100, 4), range(4))
    assert short == [1, 0.75, 0.5, 0.25], "a short run begins at lr too"
    assert Schedule(1.0, 0, 0, 3).rate(4) == 1.0
    assert Schedule(1.0, 0, 2, 3).rate(4) == 0.0
    endless = Schedule(1.0, 2, 0, None)
    assert rates(endless, (0, 1, 10**6)) == [0.5, 1, 1]
    with pytest.raises(ConfigError, match=r"decay_steps is 3.*how many steps"):
        make_schedule(OptimizerConfig(decay_steps=3), None)
