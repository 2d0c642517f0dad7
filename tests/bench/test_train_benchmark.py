"""`python -m benchmarks train`: its arithmetic by hand, and what each trainer is to do.

Blind spot: that TRL's trainer does what it is asked to; it has an environment of its own."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.process import answer_line, last_answer
from benchmarks.train import measure as train
from benchmarks.train import table as train_table
from benchmarks.train.clock import Clock
from benchmarks.train.job import Curve, Point, reached
from benchmarks.train.trl_worker import arguments
from tests.support.runs import ROOT

TRL = ROOT / ".venv-trl" / "bin" / "python"


def point(step: int, accuracy: float) -> Point:
    """Steps of 2 s, 3 CPU s and 8 completions."""
    return Point(step, 8 * step, 2.0 * step, 3.0 * step, accuracy)


def training(trainer: str, setting: str, seed: int, *accuracies: float, pace: float = 1.0) -> train.Training:
    """Evaluated every 10 steps; pace: times the seconds of `point`."""
    points = [point(10 * i, accuracy) for i, accuracy in enumerate(accuracies)]
    timed = [Point(p.step, p.samples, pace * p.seconds, pace * p.cpu_seconds, p.accuracy) for p in points]
    return train.Training(trainer, setting, seed, 5.0, tuple(timed))


def options(**changes: Any) -> train.TrainOptions:
    plain: dict[str, Any] = {
        "schemes": ("bf16",), "seeds": (0,), "trl": (), "trl_python": TRL, "trl_lr": 2e-4, "every": 5,
        "targets": (0.5,), "overrides": {},
    }  # fmt: skip
    return train.TrainOptions(**{**plain, **changes})


def test_an_accuracy_is_reached_on_the_line_to_the_first_evaluation_that_has_it():
    """By hand: from 40 % at step 10 to 60 % at step 20, 50 % lies half-way, at step 15; a later fall below it, or an
    evaluation that has exactly as much, changes nothing."""
    points = [point(0, 0.3), point(10, 0.4), point(20, 0.6), point(30, 0.45), point(40, 0.7)]
    assert reached(points, 0.5) == Point(15, 120, 30.0, 45.0, 0.5)
    assert reached(points, 0.6) == points[2] and reached(points, 0.65) == Point(38, 304, 76.0, 114.0, 0.65)
    assert reached(points, 0.3) == reached(points, 0.2) == points[0]
    assert reached(points, 0.71) is None and reached([], 0.5) is None


def test_ratios_are_to_the_quickest_setting_of_trl_with_the_same_seed(tmp_path: Path):
    """By hand, seconds to 50 %: QaRL 10 with seed 0 and 20 with seed 1, TRL fp32 40 and 30, default 60 with seed 1 and
    never with seed 0. So 10/40 and 20/30, and the median of two is their mean."""
    trainings = [
        training("trl", "fp32", 0, 0.3, 0.4, 0.5), training("trl", "fp32", 1, 0.3, 0.5, pace=1.5),
        training("trl", "default", 0, 0.3, 0.4, 0.4), training("trl", "default", 1, 0.3, 0.5, pace=3),
        training("qarl", "bf16", 0, 0.3, 0.7), training("qarl", "bf16", 1, 0.3, 0.5),
    ]  # fmt: skip
    rows = {(row.trainer, row.setting): row for row in train.summary(trainings, (0.5,))}
    qarl, never = rows["qarl", "bf16"], rows["trl", "default"]
    assert (qarl.seconds, qarl.cpu_seconds, qarl.samples) == (15, 22.5, 60)
    assert qarl.of_trl == qarl.cpu_of_trl == pytest.approx((10 / 40 + 20 / 30) / 2)
    assert never.seconds is never.samples is never.of_trl is None
    assert rows["trl", "fp32"].of_trl == 1
    assert train_table.table(trainings, (0.5, 0.6)).texts()[6:]
    assert all(file.stat().st_size for file in train_table.plot(trainings, tmp_path / "curves"))
    assert json.loads(json.dumps(train.as_data(trainings, options())))["reached"][0]["trainer"] == "trl"


def test_the_clock_leaves_evaluations_out():
    """Contract: neither an evaluation's wall time nor its CPU time is in a later point's."""
    clock = Clock(samples=8)
    clock.evaluated(0, 0.1)
    clock.begin()
    time.sleep(0.02)
    clock.begin()
    for step in (1, 2):
        clock.evaluate()
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        clock.evaluated(step, 0.2)
    curve = clock.curve()
    first, second, third = curve.points
    assert first == Point(0, 0, 0.0, 0.0, 0.1) and curve.startup > 0
    assert 0.02 <= second.seconds <= third.seconds < 0.2 and third.cpu_seconds < 0.2
    assert [p.samples for p in curve.points] == [0, 8, 16]
    assert Curve.parse(last_answer(answer_line(curve))) == curve


def test_trl_takes_over_what_a_run_says():
    """Contract: model, problems, completions, updates and lengths of the run; so as many completions an update."""
    overrides = {"steps": "7", "rollout.prompts": "32", "learner.mini_batches": "4"}
    chosen = options(trl=("fp32",), overrides=overrides, trl_lr=1e-3, every=3)
    config = train.config_of(chosen, "w4a16", 5)
    assert config.learner.objective.name == "grpo"
    assert (config.scheme, config.seed, config.eval.every, config.export) == ("w4a16", 5, 3, False)
    job = train.trl_job(config, chosen, "fp32", Path("policy"), Path("problems.json"))
    assert (job.model, job.problems) == ("policy", "problems.json")
    assert (job.steps, job.prompts, job.samples, job.updates, job.seed, job.lr) == (7, 32, 8, 4, 5, 1e-3)
    asked = arguments(job, 16, "out", False)
    assert asked["per_device_train_batch_size"] * asked["gradient_accumulation_steps"] * job.updates == 32 * 8
    assert asked["steps_per_generation"] * 16 == 32 * 8 and asked["max_steps"] == 7 * 4
    assert asked["bf16"] is False and asked["num_generations"] == 8 and asked["max_completion_length"] == 8
