"""Dynamic sampling without an engine: which rounds are sampled, what is kept."""

from types import SimpleNamespace
from typing import Any

import pytest

from qarl.configs.schema.run import RunConfig
from qarl.configs.seeds import stable_hash, step_seed
from qarl.learner.processes import Processes
from qarl.learner.stopwatch import Stopwatch
from qarl.report.metrics import batch_metrics
from qarl.rollout.types import Completion, Group, Prompt
from qarl.run.rollouts import sample_step
from qarl.tasks import RewardError

PROMPTS = 4


class Recorder:
    """A task, prompter and engine in one: problem n is the number n; rewards are equal unless n is
    in `teaching`.
    """

    def __init__(self, teaching: set[int]):
        self.teaching = teaching
        self.asked: list[tuple[int, int, int]] = []
        self.seeds: list[int] = []

    rollout = time_limit = None

    def speaker(self, rollout: None, time_limit: None) -> None:
        assert rollout is time_limit is None

    def problems(
        self,
        split: str,
        start: int,
        count: int,
        seed: int,
    ) -> list[SimpleNamespace]:
        assert split == "train"
        self.asked.append((start, count, seed))
        return [
            SimpleNamespace(id=str(n), question=str(n), answer="")
            for n in range(start, start + count)
        ]

    def prompt(self, problem: Any) -> Prompt:
        return Prompt(problem.id, problem.question, (1,))

    def generate(self, prompts: list[Prompt], sampling: Any) -> list[list[Completion]]:
        self.seeds.append(sampling.seed)
        return [
            [Completion((2,), (-0.5,), str(k), 0, "stop") for k in range(sampling.samples)]
            for _ in prompts
        ]

    def rewards(self, responses: list[Any]) -> list[float]:
        return [float(int(r.problem.id) in self.teaching and r.text == "0") for r in responses]


def run(
    dynamic: int | None, step: int, teaching: set[int]
) -> tuple[Recorder, list[str], list[str]]:
    """Return the recorder with the sampled and the selected problems."""
    recorder = Recorder(teaching)
    policy = SimpleNamespace(task=recorder, prompter=recorder, processes=Processes())
    session: Any = SimpleNamespace(policy=policy, engine=recorder)
    rollout = {"prompts": PROMPTS, "samples": 2, "dynamic_sampling": dynamic}
    config = RunConfig.model_validate({"seed": 5, "rollout": rollout})
    sampled, kept = sample_step(session, config, step, Stopwatch())
    assert batch_metrics(sampled)["prompts"] == len(sampled)
    return recorder, [g.prompt.id for g in sampled], [g.prompt.id for g in kept]


def test_metrics_of_a_step_by_hand():
    """Metrics are of completions, but for the groups' own: the deviation, 1/2 of rewards 0 and
    1, and the share that differ.
    """

    def group(rewards: tuple[float, ...], finish: str) -> Group:
        completions = tuple(
            Completion((2,) * n, (-0.5,) * n, "", 0, finish) for n in range(1, 1 + len(rewards))
        )
        return Group(Prompt("p", "", (1,)), completions, rewards, unscored=1)

    metrics = batch_metrics(
        [
            group((0.0, 1.0), "length"),
            group((1.0, 1.0, 1.0), "stop"),
            group((1.0,), "stop"),
        ]
    )
    expected = {
        "prompts": 3,
        "unscored": 3,
        "truncated": 2 / 6,
        "response_tokens": 10 / 6,
    }
    expected |= {
        "reward": 5 / 6,
        "reward_deviation": 0.5 / 3,
        "mixed_reward_groups": 1 / 3,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_without_it_a_step_is_one_round_and_keeps_everything():
    recorder, sampled, kept = run(None, 3, {13})
    assert recorder.asked == [(12, PROMPTS, 5)]
    assert (
        sampled
        == kept
        == [
            "12",
            "13",
            "14",
            "15",
        ]
    )
    assert recorder.seeds == [stable_hash("step", 5, 3) >> 1]


def test_rounds_are_repeated_until_the_batch_is_full():
    """Step 1 with two extra rounds owns problems 12–23. Of the first four three teach: one more
    round, cut to four.
    """
    recorder, sampled, kept = run(
        2,
        1,
        {12, 13, 15, 16, 18, 20},
    )
    assert recorder.asked == [(12, PROMPTS, 5), (16, PROMPTS, 5)]
    assert sampled == [str(n) for n in range(12, 20)]
    assert kept == [
        "12",
        "13",
        "15",
        "16",
    ]
    assert len(set(recorder.seeds)) == 2


@pytest.mark.parametrize(("dynamic", "rounds"), [(0, 1), (1, 2), (3, 4)])
def test_rounds_are_bounded(dynamic: int, rounds: int):
    """Contract: a batch that cannot be filled is learned from as it is; if nothing teaches, it is
    empty.
    """
    recorder, sampled, kept = run(dynamic, 0, {1})
    assert len(recorder.asked) == rounds
    assert len(sampled) == rounds * PROMPTS
    assert kept == ["1"]
    assert run(dynamic, 0, set())[2] == []


def test_steps_do_not_share_problems_or_seeds():
    """Every (step, round) has its own problems and seed, whatever earlier steps needed: a resumed
    run repeats them.
    """
    asked = [start for step in range(5) for start, _, _ in run(2, step, set())[0].asked]
    assert asked == list(range(0, 5 * 3 * PROMPTS, PROMPTS))
    seeds = {step_seed(0, step, attempt) for step in range(5) for attempt in range(3)}
    assert len(seeds) == 15


def test_completions_without_a_signal_are_left_out_and_counted(monkeypatch):
    """A group of one teaches nothing; where none has a signal, the run says so instead of going on
    for nothing.
    """
    mute = {"120", "121", "130"}
    monkeypatch.setattr(
        Recorder,
        "rewards",
        lambda _, rs: [None if r.problem.id + r.text in mute else 1.0 for r in rs],
    )
    _, sampled, kept = run(None, 3, set())
    assert sampled == ["12", "13", "14", "15"]
    assert kept == ["14", "15"]
    monkeypatch.setattr(Recorder, "rewards", lambda _, rs: [None] * len(rs))
    monkeypatch.setattr(Recorder, "name", "numbers", raising=False)
    with pytest.raises(
        RewardError,
        match=r"'numbers' gave None \(no signal\) for all 8 completions of s",
    ):
        run(None, 3, set())
