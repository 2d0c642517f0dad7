"""Early warnings: silent on runs that learn or do nothing, and one for each collapse. Runs are
generated, step by step, as smooth curves with noise; what a real collapse looks like beyond that is
not seen here.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from qarl.report.early_warning import EarlyWarningError, RunWatch, early_warnings

Curve = Callable[[float], float]
HEALTHY: dict[str, Curve] = {
    "flat": lambda x: 0.3,
    "learns": lambda x: 0.2 + 0.4 * x,
    "saturates": lambda x: 0.2 + 0.7 * (1 - math.exp(-6 * x)),
    "forgets a little": lambda x: 0.2 + 0.4 * math.sin(math.pi * x / 1.6),
}


def lines_of(
    steps: int, seed: int, reward: Curve = HEALTHY["learns"], **curves: Curve
) -> list[dict[str, Any]]:
    """Return metrics with 10% noise on all fields but the reward, whose noise is 0.01 to 0.1 a
    step.
    """
    generator = random.Random(seed)
    noise = generator.choice((0.01, 0.03, 0.1))
    fields: dict[str, Curve] = {
        "reward_deviation": lambda x: math.sqrt(max(reward(x) * (1 - reward(x)), 0.01)),
        "response_tokens": lambda x: 80 * (1 + 0.2 * x),
        "truncated": lambda x: 0.01,
        "learn/mismatch/mean_abs": lambda x: 0.12,
        "learn/entropy": lambda x: 0.7 * math.exp(-1.2 * x),
    }
    fields |= {name.replace("__", "/"): curve for name, curve in curves.items()}
    found = []
    for number in range(steps):
        x = number / steps
        values = {name: curve(x) * (1 + generator.gauss(0, 0.1)) for name, curve in fields.items()}
        drawn = min(1.0, max(0.0, reward(x) + generator.gauss(0, noise)))
        found.append({"step": number + 1, "reward": drawn, **values})
    return found


def late(before: float, after: float) -> Curve:
    """Return a curve that changes over the third quarter of a run."""
    return lambda x: before + (after - before) * min(1.0, max(0.0, 4 * (x - 0.5)))


@pytest.mark.parametrize("kind", [*HEALTHY, "becomes sure of what is right"])
def test_healthy_runs_are_silent(kind: str):
    curves = {} if kind in HEALTHY else {"learn__entropy": late(0.7, 0.01)}
    for seed in range(104):
        lines = lines_of(
            150 if seed < 100 else 1000,
            seed,
            HEALTHY.get(kind, HEALTHY["saturates"]),
            **curves,
        )
        assert early_warnings(lines) == [], seed


COLLAPSES: dict[str, tuple[Curve, dict[str, Curve], set[str]]] = {
    "mismatch grows": (
        HEALTHY["learns"],
        {"learn__mismatch__mean_abs": late(0.01, 0.4)},
        {"mismatch"},
    ),
    "one answer, no gain": (
        HEALTHY["flat"],
        {"learn__entropy": late(0.7, 0.01)},
        {"entropy"},
    ),
    "noise": (
        late(0.6, 0.0),
        {"learn__entropy": late(0.7, 3.0)},
        {"entropy", "reward"},
    ),
    "loops": (
        late(0.6, 0.1),
        {"response_tokens": late(80, 400), "truncated": late(0.01, 0.9)},
        {"length", "reward"},
    ),
    "nothing said": (
        late(0.6, 0.0),
        {"response_tokens": late(80, 3)},
        {"length", "reward"},
    ),
    "rewards are noise": (
        late(0.8, 0.3),
        {"reward_deviation": late(0.07, 0.28)},
        {"deviation", "reward"},
    ),
    "falls below its start": (
        late(0.6, 0.2),
        {"reward_deviation": lambda x: 0.4},
        {"reward"},
    ),
}


@pytest.mark.parametrize("kind", COLLAPSES)
def test_collapses_are_seen_once_and_named(kind: str):
    """Contract: each sign is named once, after the collapse begins and before the run ends."""
    reward, curves, signs = COLLAPSES[kind]
    for seed in range(20):
        found = early_warnings(lines_of(200, seed, reward, **curves))
        assert sorted(warning.sign for warning in found) == sorted(signs), seed
        assert all(100 < warning.step <= 170 for warning in found)


WARNED_STEPS: dict[str, list[dict[str, int]]] = {
    "falls below its start": [
        {"reward": 53},
        {"reward": 51},
        {"reward": 57},
        {"reward": 53},
        {"reward": 63},
        {"reward": 55},
    ],
    "loops": [
        {"reward": 52, "length": 56},
        {"reward": 51, "length": 57},
        {"reward": 55, "length": 61},
        {"reward": 52, "length": 63},
        {"reward": 61, "length": 75},
        {"reward": 54, "length": 77},
    ],
    "mismatch grows": [
        {"mismatch": 53},
        {"mismatch": 53},
        {"mismatch": 56},
        {"mismatch": 55},
        {"mismatch": 61},
        {"mismatch": 60},
    ],
    "noise": [
        {"reward": 51, "entropy": 57},
        {"reward": 50, "entropy": 58},
        {"reward": 54, "entropy": 64},
        {"reward": 52, "entropy": 64},
        {"reward": 58},
        {"reward": 54},
    ],
    "nothing said": [
        {"reward": 51, "length": 63},
        {"reward": 50, "length": 62},
        {"reward": 54, "length": 80},
        {"reward": 52},
        {"reward": 58},
        {"reward": 54},
    ],
    "one answer, no gain": [
        {"entropy": 72},
        {"entropy": 72},
        {},
        {},
        {},
        {},
    ],
    "rewards are noise": [
        {"deviation": 52, "reward": 52},
        {"reward": 51, "deviation": 52},
        {"deviation": 55, "reward": 55},
        {"reward": 52, "deviation": 55},
        {"deviation": 61, "reward": 61},
        {"reward": 54, "deviation": 59},
    ],
}
"""Collapse → sign and step of each warning, for collapses that go far, half as far and a quarter as
far, each with seeds 0 and 1.
"""
WORDS = {
    ("mismatch grows", "mismatch"): (
        "mean |Δ log p| of learner and sampler grew from 0.0097 to 0.06 nats a token: updates are"
        " made for another policy than the one that samples; see learn/log_ratio for the part that"
        " grew"
    ),
    ("one answer, no gain", "entropy"): (
        "entropy went from 0.68 to 0.063 nats a token, without a gain in reward: the policy has"
        " collapsed; lower the learning rate, or add a KL penalty"
    ),
    ("noise", "entropy"): (
        "entropy went from 0.68 to 1.4 nats a token, and the reward fell: the policy is becoming"
        " noise; lower the learning rate"
    ),
    ("loops", "length"): (
        "completions went from 80 to 161 tokens, 23% of them cut off: look for loops among them"
        " (qarl report), or raise rollout.max_new_tokens"
    ),
    ("nothing said", "length"): (
        "completions went from 80 to 38 tokens, and the reward fell: the policy stops before it"
        " answers"
    ),
    ("rewards are noise", "deviation"): (
        "the reward's deviation within groups grew from 0.072 to 0.093 while the reward fell from"
        " 0.819 to 0.742: what rewards differ by is noise"
    ),
    ("falls below its start", "reward"): (
        "the reward fell from 0.619 to 0.544: the checkpoints in between are better; lower the"
        " learning rate, or see learn/mismatch and learn/phantom_clipped"
    ),
}
"""Collapse and sign → text of the warning of a collapse that goes far, with seed 0."""


def partial(curve: Curve, part: float) -> Curve:
    """Return a curve that changes by the given fraction of what `curve` changes by."""
    return lambda x: curve(0) + part * (curve(x) - curve(0))


def gradual_runs(kind: str) -> list[list[dict[str, Any]]]:
    """Return the metrics of six runs that collapse more and more slowly."""
    reward, curves, _ = COLLAPSES[kind]
    runs = []
    for part in (1.0, 0.5, 0.25):
        slower = {name: partial(curve, part) for name, curve in curves.items()}
        runs += [lines_of(90, seed, partial(reward, part), **slower) for seed in (0, 1)]
    return runs


@pytest.mark.parametrize("kind", COLLAPSES)
def test_gradual_collapses_are_warned_of_at_these_steps(kind: str):
    """Contract: a threshold that moves changes these steps."""
    warned = [
        {warning.sign: warning.step for warning in early_warnings(run)}
        for run in gradual_runs(kind)
    ]
    assert warned == WARNED_STEPS[kind]


@pytest.mark.parametrize(("kind", "sign"), WORDS)
def test_warnings_quote_what_changed_and_name_the_remedy(kind: str, sign: str):
    texts = {warning.sign: warning.text for warning in early_warnings(gradual_runs(kind)[0])}
    assert texts[sign] == WORDS[kind, sign]


def test_a_resumed_run_is_not_warned_again():
    lines = lines_of(200, 0, late(0.6, 0.0))
    assert [w.sign for w in early_warnings(lines)] == ["reward"]
    assert [w for line in lines[180:] for w in RunWatch(lines[:180]).add(line)] == []


def test_a_policy_that_breaks_at_once_is_seen():
    """Within two steps, as the embedded default at 40 times its learning rate: there is no healthy
    window to compare with, but nothing is taught any more and every completion is cut off.
    """
    broken = [
        {
            "step": n,
            "reward": 0.25 * (n == 1),
            "response_tokens": 8.0,
            "truncated": float(n > 5),
            "mixed_reward_groups": 0.5 * (n == 1),
        }
        for n in range(1, 60)
    ]
    found = early_warnings(broken)
    assert [(warning.sign, warning.step) for warning in found] == [
        ("groups", 11),
        ("length", 20),
    ]


def first_step(moved: float | None) -> list[dict[str, Any]]:
    """Return the metrics of two steps, of which the first moved the policy by so many nats."""
    return [{"step": n, "reward": 0.2, "learn/kl_from_start": moved} for n in (1, 2)]


def test_a_first_step_that_moves_the_policy_far_is_warned_of_once():
    """Later steps may be as far from the start as they like: a policy that learns goes there."""
    (warning,) = early_warnings(first_step(0.42))
    assert (warning.sign, warning.step) == ("first step", 1)
    assert warning.text.startswith("the first step moved the policy by 0.42 nats a token (KL)")
    for moved in (None, math.nan, 0.26):
        assert early_warnings(first_step(moved)) == []
    assert early_warnings([*first_step(0.1), {"step": 3, "learn/kl_from_start": 2.0}]) == []


def test_a_run_stopped_at_its_first_step_has_no_checkpoint_to_resume_from():
    watch = RunWatch(stops=True, last_step=10)
    with pytest.raises(EarlyWarningError, match=r"at step 1: .* Start again with other settings"):
        watch.add(first_step(0.42)[0])


def test_steps_that_learned_nothing_are_stepped_over():
    """Contract: steps that lack the learner's fields, or hold values that are not finite, are
    skipped.
    """
    lines = [{"step": n, "reward": 0.0, "learn/entropy": math.inf} for n in range(1, 100)]
    assert early_warnings(lines) == []


def test_a_warning_stops_a_run_that_asks_for_it():
    """Contract: before the last step the run stops with the sign and the remedy. On the last step
    the run is done and no error is raised.
    """
    lines = lines_of(200, 0, late(0.6, 0.0))
    (warning,) = early_warnings(lines)
    for steps, stopped in ((200, True), (warning.step, False)):
        watch = RunWatch(lines[: warning.step - 1], stops=True, last_step=steps)
        if stopped:
            with pytest.raises(
                EarlyWarningError,
                match=rf"stopped at step {warning.step}: the reward fell .*--early",
            ):
                watch.add(lines[warning.step - 1])
        else:
            assert watch.add(lines[warning.step - 1]) == [warning]
