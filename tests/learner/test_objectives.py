"""Tests of every objective, correction, aggregation and penalty by hand, both values and gradients.

A user's own objective is found, called like the shipped ones, and refused with the reason if it is
wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.configs.errors import ConfigError
from qarl.configs.load import load_config
from qarl.configs.schema.learner import LearnerConfig
from qarl.configs.schema.objectives import (
    AnyAggregation,
    AnyCorrection,
    AnyObjective,
    TruncatedConfig,
    ratio_from,
)
from qarl.learner.learn_stats import LearnStats
from qarl.learner.loss.aggregation import BatchSize, mean_over_tokens
from qarl.learner.loss.corrections import correction
from qarl.learner.loss.loss import LossInput, policy_loss
from qarl.learner.loss.metrics import LossMetrics, mean
from qarl.learner.objectives import OBJECTIVES, ObjectiveInput, find_objective
from qarl.learner.objectives.own import ObjectiveError, own
from qarl.learner.objectives.ratios import (
    sequence_advantages,
    sequence_log_ratio,
    sequence_mean,
    shadowed,
)
from qarl.learner.processes import Processes
from tests.support.cases import pattern
from tests.support.profiles import examples
from tests.support.tensors import seeded

Rows = Sequence[Sequence[float]]
CORRECTIONS = [name for section in get_args(AnyCorrection) for name in section.names()]
AGGREGATIONS = [name for section in get_args(AnyAggregation) for name in section.names()]
TBPO = {"name": "tbpo", "epsilon_high": 0.2, "delta_high": 0.3, "delta_low": 0.1}
GRPO = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.3}


def learner_config(objective: str | dict[str, Any], **options: Any) -> LearnerConfig:
    chosen = {"name": objective} if isinstance(objective, str) else objective
    return LearnerConfig.model_validate({"objective": chosen, "mini_batches": 1, **options})


def loss_input(
    cur_old: Rows, old_sampler: Rows, advantages: Sequence[float], dtype=torch.float32
) -> LossInput:
    """Return log-probs with the given differences per token.

    Rows may differ in length; the rest is padding.
    """
    longest = max(len(row) for row in cur_old)
    response_mask = torch.zeros(len(cur_old), longest, dtype=torch.bool)
    current = torch.zeros(len(cur_old), longest, dtype=dtype)
    old = torch.zeros(len(cur_old), longest, dtype=dtype)
    sampler = torch.zeros(len(cur_old), longest, dtype=dtype)
    for b, (upper, lower) in enumerate(zip(cur_old, old_sampler, strict=True)):
        for t, (up, low) in enumerate(zip(upper, lower, strict=True)):
            response_mask[b, t] = True
            old[b, t] = -1.0 - 0.25 * t - 0.5 * b
            current[b, t] = old[b, t] + up
            sampler[b, t] = old[b, t] - low
    advantage = torch.where(
        response_mask,
        torch.tensor(advantages, dtype=dtype)[:, None],
        0.0,
    )
    return LossInput(current.requires_grad_(), old, sampler, None, response_mask, advantage)


def old_of(given: LossInput) -> torch.Tensor:
    """Return the old log-probs, which every input of this file has."""
    assert given.old is not None
    return given.old


def random_input(
    seed: int,
    lengths: Sequence[int] = (4, 1, 7, 3),
    spread: float = 0.3,
    dtype=torch.float64,
):
    generator = seeded(seed)

    def rows() -> list[list[float]]:
        return [(torch.randn(n, generator=generator) * spread).tolist() for n in lengths]

    return loss_input(
        rows(), rows(), torch.randn(len(lengths), generator=generator).tolist(), dtype
    )


def evaluate(given: LossInput, config: LearnerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sequence's token mean of the loss and of the clipped share, [B] each."""
    weight = correction(old_of(given), given.sampler, given.response_mask, config.correction).weight
    proximal = given.sampler if ratio_from(config.correction) == "sampler" else old_of(given)
    inputs = ObjectiveInput(given.current, proximal, weight, given.response_mask, given.advantages)
    result = OBJECTIVES[config.objective.name](inputs, config.objective)
    return mean_over_tokens(result.loss, given.response_mask), mean_over_tokens(
        result.clipped.float(), given.response_mask
    )


def gradient(loss: torch.Tensor, given: LossInput) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, given.current)
    return found


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def totals(given: LossInput) -> BatchSize:
    return BatchSize(len(given.response_mask), int(given.response_mask.sum()))


def test_the_switch_has_every_objective_of_the_configuration():
    assert [*OBJECTIVES, "own"] == [
        name for section in get_args(AnyObjective) for name in section.names()
    ]


BANDS = {
    "below the upper bound 1.2": (1.5, 0.1, None),
    "e^0.25 = 1.284 > 1.2": (1.5, 0.25, 1.2),
    "positive: the lower bound is 0, nothing to cut": (1.5, -0.7, None),
    "e^0.2 = 1.221 < 1.3": (-0.8, 0.2, None),
    "e^0.3 = 1.350 > 1.3": (-0.8, 0.3, 1.3),
    "e^-0.1 = 0.905 > 0.9": (-0.8, -0.1, None),
    "e^-0.2 = 0.819 < 0.9: cut below as well": (-0.8, -0.2, 0.9),
    "no advantage: no loss, whatever the ratio": (0.0, 0.5, 1.2),
}
"""Reason → advantage, mean of cur - old, and the bound that the ratio is cut to (None: not cut)."""


@pytest.mark.parametrize(("advantage", "mean_up", "bound"), BANDS.values(), ids=BANDS)
@pytest.mark.parametrize(
    ("mean_low", "weight"),
    [
        (0.0, 1.0),
        (0.3, math.exp(0.3)),
        (-0.4, math.exp(-0.4)),
        (1.1, 2.0),
        (-0.9, 0.5),
    ],
)
def test_tbpo_by_hand(
    advantage: float,
    mean_up: float,
    bound: float | None,
    mean_low: float,
    weight: float,
):
    """QaRL: loss = -w̃ · r̃ · A, r = exp(mean_t(cur - old)), w̃ = clip(exp(mean_t(old - sampler)),
    1/2, 2); r̃ clips r to [0, 1.2] if A ≥ 0 and to [0.9, 1.3] if A < 0.

    Derivation of the gradient: ∂r/∂cur_t = r/T, so inside the band each of the T tokens gets -w̃ ·
    r · A / T, and outside none does. Per-token differences are uneven on purpose, because only
    their mean (over T = 4) may count.
    """
    spread = [0.3, -0.5, 0.1, 0.1]  # sums to zero
    given_ = loss_input(
        [[mean_up + s for s in spread]],
        [[mean_low - 2 * s for s in spread]],
        [advantage],
    )
    share = policy_loss(given_, learner_config(TBPO), totals(given_))
    assert share.loss.item() == pytest.approx(
        -weight * (bound or math.exp(mean_up)) * advantage, rel=2e-6
    )
    metrics = share.metrics
    assert metrics.clipped == float(bound is not None)
    assert metrics.corrected == float(abs(mean_low) > math.log(2))
    assert metrics.update_log_ratio == pytest.approx(abs(mean_up), abs=1e-6)
    assert metrics.phantom_clipped == metrics.kl == 0.0
    slope = -weight * math.exp(mean_up) * advantage / 4 if bound is None else 0.0
    assert gradient(share.loss, given_)[0].tolist() == pytest.approx(
        [slope] * 4, rel=5e-6, abs=1e-12
    )


def test_grpo_by_hand():
    """J_t = w_t · min(r_t A, clip(r_t, 0.8, 1.3) A) with w_t = min(exp(old - sampler), 2), averaged
    over T = 4 tokens.

    A = 2: ratios e^0.1 (inside), e^0.5 = 1.649 (cut to 1.3), e^-0.5 = 0.607 (the min keeps it: not
    cut), 1. A = -2: e^0.1, e^0.5 (the min keeps it: not cut), e^-0.5 (cut to 0.8), 1.

    Weights: e^0.2, 2 (e^1 capped), e^-1 (not capped from below), 1. The gradient of an uncut token
    is -w_t r_t A / 4; of a cut one it is 0.
    """
    ups = [0.1, 0.5, -0.5, 0.0]
    lows = [0.2, 1.0, -1.0, 0.0]
    given_ = loss_input([ups, ups], [lows, lows], [2.0, -2.0])
    loss, clipped = evaluate(given_, learner_config(GRPO))
    w = [math.exp(0.2), 2.0, math.exp(-1.0), 1.0]
    r = [
        math.exp(0.1),
        math.exp(0.5),
        math.exp(-0.5),
        1.0,
    ]
    cut_above = [r[0], 1.3, r[2], 1.0]
    cut_below = [r[0], r[1], 0.8, 1.0]
    positive = -2.0 * dot(w, cut_above) / 4
    negative = 2.0 * dot(w, cut_below) / 4
    assert loss.tolist() == pytest.approx([positive, negative], rel=2e-6)
    assert clipped.tolist() == [0.25, 0.25]
    slopes = [-2.0 * a * b / 4 for a, b in zip(w, r, strict=True)]
    found = gradient(loss.sum(), given_)
    assert found[0].tolist() == pytest.approx(
        [slopes[0], 0.0, slopes[2], slopes[3]],
        rel=5e-6,
    )
    assert found[1].tolist() == pytest.approx(
        [-slopes[0], -slopes[1], 0.0, -slopes[3]],
        rel=5e-6,
    )


def sapo_gate(r: float, tau: float) -> tuple[float, float]:
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 / tau * gate, 4 * gate * (1 - gate)


ONE_TOKEN: dict[str, list[tuple[float, float, float, float]]] = {
    "tbpo": [
        (1.0003, 2.0, 2.0006, 2.0),
        (1.0005, 2.0, 2.0008, 0.0),
        (0.5, 2.0, 1.0, 2.0),
        (1.0006, -2.0, -2.0012, -2.0),
        (1.0008, -2.0, -2.0014, 0.0),
        (0.9998, -2.0, -1.9996, -2.0),
        (0.9996, -2.0, -1.9994, 0.0),
    ],
    "dapo": [
        (1.27, 2.0, 2.54, 2.0),
        (1.29, 2.0, 2.56, 0.0),
        (0.79, -2.0, -1.6, 0.0),
        (9.0, -2.0, -18.0, -2.0),
    ],
    "positive_grpo": [
        (1.1, 2.0, 2.2, 2.0),
        (1.3, 2.0, 2.4, 0.0),
        (0.1, 2.0, 0.2, 2.0),
        (1.1, -2.0, 0.0, 0.0),
    ],
    "dual_clip": [
        (1.3, 2.0, 2.4, 0.0),
        (5.0, 2.0, 2.4, 0.0),
        (2.9, -2.0, -5.8, -2.0),
        (3.1, -2.0, -6.0, 0.0),
        (0.7, -2.0, -1.6, 0.0),
    ],
    "gspo": [
        (1.0003, 2.0, 2.0006, 2.0),
        (1.0005, 2.0, 2.0008, 0.0),
        (0.9998, -2.0, -1.9996, -2.0),
        (0.9996, -2.0, -1.9994, 0.0),
        (50.0, -2.0, -100.0, -2.0),
    ],
    "gspo_dual_clip": [
        (1.0005, 2.0, 2.0008, 0.0),
        (2.9, -2.0, -5.8, -2.0),
        (3.1, -2.0, -6.0, 0.0),
    ],
    "sapo": [(1.0, 2.0, 4.0, 2.0)],
    "cispo": [
        (4.9, 2.0, 9.8, 2.0),
        (8.0, 2.0, 10.0, 1.25),
        (0.01, -2.0, -0.02, -2.0),
    ],
    "on_policy": [(1.0, -2.0, -2.0, -2.0)],
    "pg_seq_is": [(7.0, -2.0, -14.0, -2.0)],
}
"""Objective → a single token's ratio r and advantage A, the value of J, and its slope dJ/dr, which
is 0 if the ratio is cut.
"""
for r, A, tau in (
    (1.7, 0.5, 1.0),
    (0.4, -3.0, 1.05),
):
    value, slope = sapo_gate(r, tau)
    ONE_TOKEN["sapo"].append((r, A, A * value, A * slope))


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, some in ONE_TOKEN.items() for case in some],
)
def test_objectives_of_one_token_by_hand(name: str, case: tuple[float, float, float, float]):
    """Contract: for a response of one token every ratio is r = π_cur/π_old.

    Without a correction the loss is -J, and its gradient to log π_cur is -r dJ/dr. A token counts
    as clipped if it has a value but no slope, or if CISPO caps its weight.
    """
    r, advantage, value, slope = case
    given_ = loss_input(
        [[math.log(r)]],
        [[0.0]],
        [advantage],
        torch.float64,
    )
    loss, clipped = evaluate(given_, learner_config(name, correction={"name": "none"}))
    # TBPO's bounds are fp32 numbers
    assert loss.item() == pytest.approx(-value, rel=1e-7, abs=1e-12)
    is_flat = value != 0 and slope == 0
    is_capped = name == "cispo" and r > 5
    assert clipped.item() == (is_flat or is_capped)
    assert gradient(loss.sum(), given_).item() == pytest.approx(
        -r * slope,
        rel=1e-9,
        abs=1e-12,
    )


@pytest.mark.parametrize(
    "name",
    [
        "tbpo",
        "grpo",
        "positive_grpo",
        "dapo",
        "dual_clip",
        "gspo",
        "gspo_dual_clip",
        "sapo",
    ],
)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_the_derivatives_of_the_values(name: str, aggregation: str):
    """Contract: gradients equal finite differences of the whole loss in float64, including weights,
    aggregation and the k3 penalty. Objectives with detached weights have no such value; the test
    below compares them with closed forms.
    """
    wide = {
        "epsilon_high": 0.1,
        "delta_high": 0.2,
        "delta_low": 0.1,
        "clip_low": 0.1,
        "clip_high": 0.1,
    }
    options = {k: v for k, v in wide.items() if k in OPTIONS[name]}
    config = learner_config(
        {"name": name, **options}, aggregation={"name": aggregation}, kl={"name": "k3"}
    )
    base = random_input(3)
    given_ = replace(base, reference=base.sampler + 0.1 * base.response_mask)

    def loss(current: torch.Tensor) -> torch.Tensor:
        return policy_loss(replace(given_, current=current), config, totals(given_)).loss

    assert gradient(loss(given_.current), given_).any()
    assert torch.autograd.gradcheck(loss, given_.current, eps=1e-6, rtol=1e-5, atol=1e-8)


OPTIONS = {section.names()[0]: section.options() for section in get_args(AnyObjective)}


@pytest.mark.parametrize("name", ["cispo", "on_policy", "pg_seq_is"])
def test_reinforce_like_gradients_in_closed_form(name: str):
    """Contract: the gradient is -x_t A ∇log π_t with x_t = min(r_t, 5), 1, or the sequence's Π r_t
    against the sampler. It is averaged by the objective's default aggregation: over all tokens,
    within responses, or summed within responses.
    """
    given_ = random_input(5)
    config = learner_config(
        name, **({} if name == "pg_seq_is" else {"correction": {"name": "none"}})
    )
    current = given_.current.detach()
    response_mask = given_.response_mask
    B = len(response_mask)
    N = int(response_mask.sum())
    T = response_mask.sum(-1, keepdim=True)
    factor, divisor = {
        "cispo": (
            (current - old_of(given_)).exp().clamp_max(5.0),
            torch.tensor(N),
        ),
        "on_policy": (torch.ones_like(current), B * T),
        "pg_seq_is": (
            ((current - given_.sampler) * response_mask).sum(-1, keepdim=True).exp(),
            torch.tensor(B),
        ),
    }[name]
    expected = -factor * given_.advantages * response_mask / divisor
    found = gradient(policy_loss(given_, config, totals(given_)).loss, given_)
    torch.testing.assert_close(found, expected)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.01, 0.3, 2.0]),
    st.sampled_from([1.0, 0.5, 2.0]),
)
@settings(max_examples=examples(60))
def test_tbpo_is_gspo_with_dual_clip_at_matching_bounds(seed: int, spread: float, weight: float):
    """Contract: with clip_low = δ_l, clip_high = ε_h and dual_clip = 1 + δ_h, losses, gradients and
    clipped sequences are equal bit for bit.

    Derivation for A < 0: max(min(s A, clip(s, 1-δ_l, 1+ε_h) A), (1+δ_h) A) = clip(s, 1-δ_l, 1+δ_h)
    A, since multiplying by A < 0 swaps max and min. Weights are powers of two, because products are
    taken in another order.
    """
    bounds = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.0 + 0.3}
    given_ = random_input(
        seed,
        (4, 1, 7, 3, 2, 2),
        spread,
        torch.float32,
    )
    found = []
    for objective in (TBPO, {"name": "gspo_dual_clip", **bounds}):
        config = learner_config(objective)
        inputs = ObjectiveInput(
            given_.current,
            old_of(given_),
            torch.full((6, 1), weight),
            given_.response_mask,
            given_.advantages,
        )
        result = OBJECTIVES[config.objective.name](inputs, config.objective)
        found.append(
            (
                result.loss,
                result.clipped,
                gradient(result.loss.sum(), given_),
            )
        )
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


differences = st.floats(-1.0, 1.0, width=32)
responses = st.lists(differences, min_size=1, max_size=7)


@pytest.mark.parametrize("name", list(OBJECTIVES))
@given(
    ups=st.lists(responses, min_size=1, max_size=5),
    padding=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(40))
def test_prompt_and_padding_positions_change_no_loss_and_get_no_gradient(
    name: str, ups: list[list[float]], padding: int, seed: int
):
    """Contract: arbitrary log-probs outside the response (prompt before it, padding after it)
    change neither losses nor clipped shares and get no gradient. Sequences do not influence each
    other.
    """
    generator = seeded(seed)
    uniform = [torch.rand(len(row), generator=generator) for row in ups]
    lows = [row.mul(3).sub(1.5).tolist() for row in uniform]
    tight = loss_input(
        ups,
        lows,
        torch.randn(len(ups), generator=generator).tolist(),
    )
    config = learner_config(name)
    B, T = tight.response_mask.shape

    def spread(values: torch.Tensor) -> torch.Tensor:
        wide = torch.randn(B, T + padding + 2, generator=generator) * 10  # garbage
        wide[:, 2 : T + 2] = torch.where(
            tight.response_mask,
            values,
            wide[:, 2 : T + 2],
        )
        return wide

    mask = torch.zeros(B, T + padding + 2, dtype=torch.bool)
    mask[:, 2 : T + 2] = tight.response_mask
    current = spread(tight.current.detach()).requires_grad_()
    wide = LossInput(
        current,
        spread(old_of(tight)),
        spread(tight.sampler),
        None,
        mask,
        spread(tight.advantages),
    )
    ours = evaluate(tight, config)
    padded = evaluate(wide, config)
    for a, b in zip(ours, padded, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    tight_gradient = gradient(ours[0].sum(), tight)
    wide_gradient = gradient(padded[0].sum(), wide)
    assert (wide_gradient[~mask] == 0).all()
    assert (tight_gradient[~tight.response_mask] == 0).all()
    torch.testing.assert_close(
        wide_gradient[mask], tight_gradient[tight.response_mask], rtol=1e-5, atol=1e-6
    )
    for b in range(B):
        alone = rows_of(tight, slice(b, b + 1), T)
        torch.testing.assert_close(
            evaluate(alone, config)[0][0],
            ours[0][b],
            rtol=1e-6,
            atol=1e-7,
        )


def rows_of(whole: LossInput, rows: Any, longest: int) -> LossInput:
    """Return some of the sequences, padded to at most `longest` positions."""

    def cut(values: Any) -> Any:
        if values is None:
            return None
        return values[rows][:, :longest] if values.ndim > 1 else values[rows]

    parts = {field.name: cut(getattr(whole, field.name)) for field in fields(LossInput)}
    return LossInput(**parts)


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("correction_name", CORRECTIONS)
def test_every_objective_is_weighted_by_every_correction(name: str, correction_name: str):
    """Contract: with old = current (ratio 1), the loss and gradient of each token are the
    uncorrected ones times the weight, which the next test computes by hand. Weights of tokens count
    one by one even if the objective's ratio is per sequence: its loss is then the mean of w_t times
    the sequence's.
    """
    base = random_input(11, spread=0.8)
    given_ = replace(base, current=old_of(base).clone().requires_grad_())
    plain = learner_config(name, correction={"name": "none"})
    config = learner_config(name, correction={"name": correction_name})
    weight = correction(
        old_of(given_), given_.sampler, given_.response_mask, config.correction
    ).weight
    weight = weight.expand_as(given_.current)
    unweighted, _ = evaluate(given_, plain)
    weighted, _ = evaluate(given_, config)
    mean_weight = sequence_mean(weight, given_.response_mask)
    torch.testing.assert_close(weighted, unweighted * mean_weight)
    expected = gradient(unweighted.sum(), given_)
    shared = name in ("tbpo", "gspo", "gspo_dual_clip")
    weight = mean_weight[:, None] if shared else weight
    torch.testing.assert_close(gradient(weighted.sum(), given_), expected * weight)


def test_corrections_by_hand():
    """One response has two tokens with log w 0.5 and -3, another a single token with log w 1.

    Both have padding.
    """
    old = torch.tensor(
        [
            [-1.0, -1.0, 7.0],
            [-1.0, 3.0, 3.0],
        ]
    )
    sampler = torch.tensor(
        [
            [-1.5, 2.0, 1.0],
            [-2.0, 9.0, 9.0],
        ]
    )
    response_mask = torch.tensor([[True, True, False], [True, False, False]])

    def found(**options: Any) -> tuple[list[list[float]], list[list[bool]]]:
        result = correction(
            old,
            sampler,
            response_mask,
            learner_config("grpo", correction=options).correction,
        )
        return result.weight.tolist(), result.truncated.tolist()

    def near(*rows: Sequence[float]) -> list[Any]:
        return [pytest.approx(row) for row in rows]

    e = math.exp
    assert found(name="none") == (
        [[1.0], [1.0]],
        [
            [False],
            [False],
        ],
    )
    weight, held = found(name="token_tis", cap=2.0)
    assert weight == near(
        [e(0.5), e(-3), 1],
        [2, 1, 1],
    )
    assert held == [
        [False] * 3,
        [True, False, False],
    ]
    weight, held = found(name="sequence_tis", cap=2.0)
    assert weight == near([e(-2.5)], [2])
    assert held == [[False], [True]]
    weight, held = found(name="geometric", cap=2.0)
    assert weight == near([0.5], [2])
    assert held == [[True], [True]]  # e^-1.25 < 1/2
    weight, held = found(name="token_mis", floor=0.5, cap=5.0)
    assert weight == near(
        [e(0.5), 0, 1],
        [e(1), 1, 1],
    )
    assert held == [
        [False, True, False],
        [False] * 3,
    ]
    weight, held = found(name="sequence_mis", cap=2.0)
    assert weight == near([e(-2.5)], [0])
    assert held == [[False], [True]]
    assert found(name="sequence_mis", cap=2.0, ratio_from="sampler")[0] == [
        [1.0],
        [0.0],
    ]
    assert found(name="token_mis", ratio_from="sampler")[0] == [
        [1.0, 0.0, 1.0],
        [1.0, 1.0, 1.0],
    ]
    values = torch.tensor(
        [
            [1.0, 2.0, 100.0],
            [50.0, -3.0, 5.0],
            [7.0, 7.0, 7.0],
        ]
    )
    mask = torch.tensor(
        [
            [True, True, False],
            [False, True, True],
            [False, False, False],
        ]
    )
    assert sequence_mean(values, mask).tolist() == [1.5, 1.0, 0.0]
    assert sequence_log_ratio(values, values - 0.5, mask).tolist() == [0.5, 0.5, 0.0]


def test_bypass_takes_the_ratio_from_the_sampler_and_counts_phantom_clipping():
    """Contract: with two tokens, A = 1 and bounds 0.8 and 1.2, a policy that has not moved (α = 0)
    and has precision gaps β of 0.5 and 0.1 is clipped at the first token because of β alone. With α
    = 0.5 and β = 0 the clip is real; with α = 0.4 and β = -0.4 nothing is clipped.
    """
    config = learner_config("grpo", correction={"name": "none", "ratio_from": "sampler"})
    given_ = loss_input(
        [[0.0, 0.0], [0.5, 0.5], [0.4, 0.4]],
        [[0.5, 0.1], [0.0, 0.0], [-0.4, -0.4]],
        [1.0] * 3,
    )
    loss, clipped = evaluate(given_, config)
    one_clipped = (1.2 + math.exp(0.1)) / 2
    assert loss.tolist() == pytest.approx([-one_clipped, -1.2, -1.0])
    assert clipped.tolist() == [0.5, 1.0, 0.0]
    share = policy_loss(given_, config, totals(given_))
    assert share.metrics.clipped == pytest.approx(1.5 / 3)
    assert share.metrics.phantom_clipped == pytest.approx(0.5 / 3)
    assert share.metrics.clipped_positive_above == pytest.approx(1 / 3)
    ratio_means = [
        (math.exp(0.5) + math.exp(0.1)) / 2,
        math.exp(0.5),
        1,
    ]
    assert share.metrics.ratio_mean == pytest.approx(sum(ratio_means) / 3)
    decoupled = policy_loss(given_, learner_config("grpo"), totals(given_))
    assert decoupled.metrics.clipped == pytest.approx(2 / 3)
    assert decoupled.metrics.phantom_clipped == 0.0


def test_aggregations_by_hand():
    """Contract: the losses -A = -1, -1 | -3 of two sequences with two tokens and one aggregate to
    -(1+1+3)/3 by token-mean, -(1+3)/2 by seq-mean-token-mean and -(2+3)/2 by seq-sum. A constant of
    10 gives a tenth of seq-sum.
    """
    given_ = loss_input(
        [[0.0, 0.0], [0.0]],
        [[0.0, 0.0], [0.0]],
        [1.0, 3.0],
    )
    for aggregation, expected in (
        ({"name": "token-mean"}, -5 / 3),
        ({"name": "seq-mean-token-mean"}, -2.0),
        ({"name": "seq-sum"}, -2.5),
        ({"name": "seq-sum", "constant": 10.0}, -0.25),
    ):
        # losses of tokens, and shared by a sequence's tokens
        for objective in ("on_policy", "tbpo"):
            config = learner_config(objective, aggregation=aggregation)
            assert policy_loss(given_, config, totals(given_)).loss.item() == pytest.approx(
                expected
            )


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_add_up_to_the_whole(name: str, aggregation: str):
    """Contract: accumulation of 1 × 8 ≡ 8 × 1 ≡ 2 + 6 sequences.

    Loss, gradient and every statistic agree in float64, including the KL penalty.
    """
    given_ = random_input(7, (4, 1, 7, 3, 1, 9, 2, 5))
    given_ = replace(given_, reference=old_of(given_) - 0.2 * given_.response_mask)
    config = learner_config(
        name, aggregation={"name": aggregation}, kl={"name": "k2", "coefficient": 0.5}
    )
    whole = policy_loss(given_, config, totals(given_))
    expected = gradient(whole.loss, given_)
    for cuts in ([1] * 8, [2, 6]):
        shares = []
        for rows in torch.arange(8).split(cuts):
            part = rows_of(
                given_,
                rows,
                int(given_.response_mask[rows].sum(-1).max()),
            )
            shares.append(policy_loss(part, config, totals(given_)))
        loss = torch.stack([share.loss for share in shares]).sum()
        torch.testing.assert_close(loss, whole.loss)
        torch.testing.assert_close(gradient(loss, given_), expected)
        added = sum((s.metrics for s in shares), LossMetrics())
        assert vars(added) == pytest.approx(vars(whole.metrics))


@given(st.floats(-3, 3), st.floats(0.01, 2))
def test_kl_estimates_by_hand(d: float, coefficient: float):
    """Contract: with d = log π_ref - log π_cur, the values of k1, k2 and k3 are -d, d²/2 and e^d -
    1 - d. Gradients to log π_cur are -d (k1, k2) and 1 - e^d (k3). The penalty adds coefficient ·
    mean to the loss and is reported without the coefficient.
    """
    values = {
        "k1": -d,
        "k2": d * d / 2,
        "k3": math.expm1(d) - d,
    }
    slopes = {"k1": -d, "k2": -d, "k3": -math.expm1(d)}
    given_ = loss_input([[0.0]], [[0.0]], [1.0], torch.float64)
    given_ = replace(given_, reference=old_of(given_) + d)
    for kind, value in values.items():
        plain = policy_loss(given_, learner_config("tbpo"), totals(given_)).loss
        config = learner_config("tbpo", kl={"name": kind, "coefficient": coefficient})
        share = policy_loss(given_, config, totals(given_))
        assert share.metrics.kl == pytest.approx(value, rel=1e-9, abs=1e-12)
        of_two = policy_loss(given_, config, BatchSize(sequences=2, tokens=8)).metrics
        assert of_two.kl == pytest.approx(value / 2, rel=1e-9, abs=1e-12), (
            "of the mini-batch's sequences"
        )
        added = share.loss - plain
        assert added.item() == pytest.approx(coefficient * value, rel=1e-9, abs=1e-12)
        assert gradient(added, given_).item() == pytest.approx(
            coefficient * slopes[kind], rel=1e-9, abs=1e-12
        )


@given(st.integers(0, 2**32 - 1))
def test_a_shadow_gives_the_value_and_the_plain_forward_the_gradient(seed: int):
    generator = seeded(seed)
    current = (-torch.rand(3, 5, generator=generator) * 9).requires_grad_()
    shadow = current.detach() + torch.randn(3, 5, generator=generator)
    mixed = shadowed(current, shadow)
    assert torch.equal(mixed, shadow)
    weights = torch.randn(3, 5, generator=generator)
    assert torch.equal(
        torch.autograd.grad((mixed * weights).sum(), current)[0],
        weights,
    )


@pytest.mark.parametrize(
    ("name", "losses", "slopes"),
    [
        # min(r A, clip(r; 0.8, 1.3) A): r = 1.105 is inside;
        # 0.607 is below and A < 0: 0.8 · -2; 1.492 is above and A > 0: 1.3 · 0.5
        (
            "grpo",
            (math.exp(0.1), -1.6, 0.65),
            (math.exp(0.1), 0, 0),
        ),
        ("on_policy", (1, -2, 0.5), (1, -2, 0.5)),
        (
            "cispo",
            (
                math.exp(0.1),
                -2 * math.exp(-0.5),
                0.5 * math.exp(0.4),
            ),
            None,
        ),
        # its bound is 1.2
        (
            "positive_grpo",
            (math.exp(0.1), 0, 0.6),
            (math.exp(0.1), 0, 0),
        ),
    ],
)
def test_each_token_has_its_own_advantage_by_hand(
    name: str, losses: Sequence[float], slopes: Sequence[float] | None
):
    """Contract: J is the mean over the masked tokens, and gaps in the mask do not count.

    Tokens 0, 1 and 3 of four are learned from, as in a conversation of several turns, with
    advantages 1, -2 and 0.5.
    """
    given_ = loss_input(
        [[0.1, -0.5, 9.0, 0.4]],
        [[0.0] * 4],
        [0.0],
        torch.float64,
    )
    mask = torch.tensor([[True, True, False, True]])
    credit = torch.tensor([[1, -2, 77, 0.5]], dtype=torch.float64)
    given_ = replace(given_, response_mask=mask, advantages=credit)
    objective = GRPO if name == "grpo" else name
    means = {
        "correction": {"name": "none"},
        "aggregation": {"name": "seq-mean-token-mean"},
    }
    loss = policy_loss(given_, learner_config(objective, **means), totals(given_)).loss
    assert loss.item() == pytest.approx(-sum(losses) / 3)
    expected = [-slope / 3 for slope in slopes or losses]
    slope = gradient(loss, given_)[0].tolist()
    assert slope[2] == 0.0
    assert [slope[t] for t in (0, 1, 3)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["tbpo", "gspo", "gspo_dual_clip"])
def test_a_ratio_of_the_whole_response_takes_one_advantage(name: str):
    """Contract: a sequence ratio takes the advantage of the first response token, even if the mask
    has gaps. Advantages that differ within a response are refused rather than averaged.
    """
    given_ = random_input(11, (4, 3), dtype=torch.float32)
    mask = given_.response_mask.clone()
    mask[:, 0] = mask[0, 2] = False
    gapped = replace(given_, response_mask=mask)
    config = learner_config(name)
    inputs = ObjectiveInput(
        gapped.current, old_of(gapped), torch.ones(2, 1), mask, gapped.advantages
    )
    assert sequence_advantages(inputs)[:, 0].tolist() == given_.advantages[:, 0].tolist()
    policy_loss(gapped, config, totals(gapped))
    uneven = gapped.advantages.clone()
    uneven[1, 2] = uneven[1, 1] + 0.5
    with pytest.raises(ConfigError, match=r"differ within a response \(.*\).*such as grpo"):
        policy_loss(replace(gapped, advantages=uneven), config, totals(gapped))


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "grpo": [0.375, 0.0, 0.25],
        "dual_clip": [0.375, 0.25, 0.25],
        "tbpo": [0.25, 0.25, 0.25],
        "sapo": [0.0, 0.0, 0.0],
    }.items(),
)
def test_clipped_shares_by_side(name: str, expected: list[float]):
    """The rows have A = 1 with ratios above, A = -1 above all bounds, A = -1 below, and A = 1 with
    one token above and one equally far below, whose sequence ratio is 1. An advantage of 0 is
    clipped on no side.
    """
    moved = [
        [2.0, 2.0],
        [2.0, 2.0],
        [-2.0, -2.0],
        [2.0, -2.0],
    ]
    given_ = loss_input(
        moved,
        [[0.0, 0.0]] * 4,
        [1.0, -1.0, -1.0, 1.0],
    )
    found = policy_loss(given_, learner_config(name), totals(given_)).metrics
    assert [
        found.clipped_positive_above,
        found.clipped_negative_above,
        found.clipped_negative_below,
    ] == expected
    idle = replace(given_, advantages=given_.advantages * 0)
    found = policy_loss(idle, learner_config(name), totals(idle)).metrics
    assert found.clipped_positive_above == 0
    assert found.clipped_negative_above == 0
    assert found.clipped_negative_below == 0


@pytest.mark.parametrize("ratio_from", ["learner", "sampler"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dual_clip", "sapo", "cispo"])
def test_a_loss_waits_for_no_device(name: str, ratio_from: str):
    """Contract: the loss and all its statistics are tensors whose values are not read, so a
    backward is queued before the host needs them. Blind spot: sequence objectives compare a
    response's advantages at once.
    """
    real = vars(
        loss_input(
            [[0.0]] * 2,
            [[0.0]] * 2,
            [1.0, -1.0],
        )
    )
    meta: dict[str, Any] = {
        name: tensor if tensor is None else tensor.to("meta") for name, tensor in real.items()
    }
    correction_ = {
        "name": "none" if ratio_from == "learner" else "token_mis",
        "ratio_from": ratio_from,
    }
    share = policy_loss(
        LossInput(**meta), learner_config(name, correction=correction_), BatchSize(2, 2)
    )
    assert share.loss.is_meta
    assert all(number is None or number.is_meta for number in share.numbers.values())


def test_metrics_add_up_by_field():
    """Contract: each number is one field, and sums, totals, means and a step's report follow from
    the class.
    """
    parts = [LossMetrics(loss=1.0, kl=0.5), LossMetrics(loss=3.0, clipped=0.25)]
    assert (
        parts[0] + parts[1]
        == LossMetrics(loss=4.0, kl=0.5, clipped=0.25)
        == sum(parts, LossMetrics())
    )
    assert mean(parts) == LossMetrics(loss=2.0, kl=0.25, clipped=0.125)
    assert mean([]) == LossMetrics()
    unmeasured = LossMetrics(loss=5.0, phantom_clipped=None)
    assert mean([unmeasured, LossMetrics(phantom_clipped=0.5)]) == LossMetrics(
        loss=2.5, phantom_clipped=0.5
    )
    assert mean([unmeasured]) == unmeasured
    assert parts[0].total(Processes()) == parts[0]
    assert {f.name for f in fields(LossMetrics)} < {f.name for f in fields(LearnStats)}


EXAMPLE = Path(__file__).parents[2] / "examples/own_objective.py"
OWN = {
    "learner.objective.name": "own",
    "learner.objective.function": f"{EXAMPLE}:objective",
}


def two_sequences() -> LossInput:
    """Return two sequences of three and two response tokens, with a learner slightly off the
    sampler.
    """
    return loss_input(
        [[0.0] * 3, [0.0] * 2],
        [[-0.1, 0.0, 0.1], [0.0, -0.2]],
        [1.0, -1.0],
    )


def loss_of(code: str, folder: Path) -> float:
    file = folder / "mine.py"
    file.write_text(
        "import torch\nfrom qarl.learner.objectives import ObjectiveResult as Result\n" + code
    )
    own.cache_clear()
    config = load_config(None, {**OWN, "learner.objective.function": f"{file}:objective"}).learner
    return float(policy_loss(two_sequences(), config, BatchSize(2, 5)).loss.detach())


def test_the_examples_loss_is_the_one_computed_by_hand():
    """Contract: the loss is Σ over the first sequence (A = 1) of -w log π / 3, halved by the mean
    over sequences; w is token_tis's weight.
    """
    config = load_config(None, OWN).learner
    assert isinstance(config.correction, TruncatedConfig)
    assert config.correction.name == "token_tis"
    inputs = two_sequences()
    share = policy_loss(inputs, config, BatchSize(2, 5))
    weight = (old_of(inputs) - inputs.sampler)[0].exp()
    by_hand = (weight * -inputs.current[0].detach()).mean() / 2
    torch.testing.assert_close(share.loss.detach(), by_hand)
    share.loss.backward()
    assert inputs.current.grad is not None
    torch.testing.assert_close(inputs.current.grad[0], -weight / 6)
    assert not inputs.current.grad[1].any()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(
            "return 1.0",
            "returned float; return qarl.learner.objectives.ObjectiveResult",
            id="no result object",
        ),
        pytest.param(
            "1 / 0",
            "raised ZeroDivisionError: division by zero (…mine.py, line 4, in objective)",
            id="an error",
        ),
        pytest.param("import sys; sys.exit(3)", "raised sys.exit(3) (…line 4", id="an exit"),
        pytest.param(
            "return Result(inputs.current.sum(), inputs.response_mask)",
            "loss (); allowed are tensors (2, 3)",
            id="a loss without axes",
        ),
        pytest.param(
            "return Result(inputs.current[:, :2], inputs.response_mask)",
            "loss (2, 2); allowed are tensors (2, 3)…and (2, 1)",
            id="a loss of other positions",
        ),
        pytest.param(
            "return Result(inputs.current, None)",
            "clipped NoneType; allowed are tensors",
            id="clipped is None",
        ),
        pytest.param(
            "return Result(inputs.current, inputs.advantages)",
            "clipped of torch.float32; allowed is torch.bool",
            id="clipped is a float",
        ),
        pytest.param(
            "return Result(inputs.weight, inputs.response_mask)",
            "a loss without gradient; it must depend on",
            id="no gradient",
        ),
    ],
)
def test_wrong_results_of_a_users_objective_are_refused(tmp_path: Path, body: str, said: str):
    """Contract: a result of the wrong type, shape or dtype is refused.

    The test above has a correct one.
    """
    with pytest.raises(ObjectiveError, match=pattern(said)):
        loss_of(f"def objective(inputs, config):\n    {body}\n", tmp_path)


def test_a_users_objective_that_is_not_found_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no function 'objective'"):
        loss_of("", tmp_path)
    with pytest.raises(
        ConfigError, match=r"must read file\.py:function.*taking \(inputs, config\)"
    ):
        find_objective(
            load_config(None, {**OWN, "learner.objective.function": "mine"}).learner.objective
        )
    with pytest.raises(
        ConfigError,
        match=r"is missing; give --learner\.objective\.function: .* file\.py:function",
    ):
        load_config(None, {"learner.objective.name": "own"})
