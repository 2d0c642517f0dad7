"""Figures of `python -m benchmarks learner` and `train`, their counts and refusals: by hand."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.family_models import FAMILIES
from benchmarks.learner import measure as learner
from benchmarks.learner import table as learner_table
from benchmarks.learner.job import Steps
from benchmarks.models import MODELS
from benchmarks.random_policy import SIZES
from benchmarks.train import measure as train
from benchmarks.train import table as train_table
from benchmarks.train.job import Point, reached
from qarl.configs.errors import ConfigError
from qarl.planning.shapes import COUNTED, shapes_of

OPTIONS = train.TrainOptions(
    schemes=("bf16",),
    seeds=(0,),
    trl=(),
    trl_python=Path("python"),
    trl_lr=2e-4,
    every=5,
    targets=(0.5,),
    overrides={},
)


def point(step: int, accuracy: float) -> Point:
    """Steps of 2 s, 3 CPU s and 8 completions."""
    return Point(step, 8 * step, 2.0 * step, 3.0 * step, accuracy)


def training(
    trainer: str, setting: str, seed: int, *accuracies: float, pace: float = 1.0
) -> train.Training:
    """Evaluated every 10 steps; pace: times the seconds of `point`."""
    points = [point(10 * i, accuracy) for i, accuracy in enumerate(accuracies)]
    timed = [
        Point(p.step, p.samples, pace * p.seconds, pace * p.cpu_seconds, p.accuracy) for p in points
    ]
    return train.Training(trainer, setting, seed, 5.0, tuple(timed))


def test_an_accuracy_is_reached_on_the_line_to_the_first_evaluation_that_has_it():
    """Computed by hand: from 40 % at step 10 to 60 % at step 20, 50 % lies half-way, at step 15;
    a later fall below it, or an evaluation that has exactly as much, changes nothing.
    """
    points = [
        point(0, 0.3),
        point(10, 0.4),
        point(20, 0.6),
        point(30, 0.45),
        point(40, 0.7),
    ]
    assert reached(points, 0.5) == Point(15, 120, 30.0, 45.0, 0.5)
    assert reached(points, 0.6) == points[2]
    assert reached(points, 0.65) == Point(38, 304, 76.0, 114.0, 0.65)
    assert reached(points, 0.3) == reached(points, 0.2) == points[0]
    assert reached(points, 0.71) is None
    assert reached([], 0.5) is None


def test_ratios_are_to_the_quickest_setting_of_trl_with_the_same_seed(tmp_path: Path):
    """Computed by hand, seconds to 50 %: QaRL 10 with seed 0 and 20 with seed 1, TRL fp32 40 and
    30, default 60 with seed 1 and never with seed 0. So 10/40 and 20/30, and the median of two
    is their mean.
    """
    trainings = [
        training("trl", "fp32", 0, 0.3, 0.4, 0.5),
        training("trl", "fp32", 1, 0.3, 0.5, pace=1.5),
        training("trl", "default", 0, 0.3, 0.4, 0.4),
        training("trl", "default", 1, 0.3, 0.5, pace=3),
        training("qarl", "bf16", 0, 0.3, 0.7),
        training("qarl", "bf16", 1, 0.3, 0.5),
    ]
    rows = {(row.trainer, row.setting): row for row in train.summary(trainings, (0.5,))}
    qarl = rows["qarl", "bf16"]
    never = rows["trl", "default"]
    assert qarl.seconds == 15
    assert qarl.cpu_seconds == 22.5
    assert qarl.samples == 60
    assert qarl.of_trl == qarl.cpu_of_trl == pytest.approx((10 / 40 + 20 / 30) / 2)
    assert never.seconds is never.samples is never.of_trl is None
    assert rows["trl", "fp32"].of_trl == 1
    assert train_table.table(trainings, (0.5, 0.6)).texts()[6:]
    assert all(file.stat().st_size for file in train_table.plot(trainings, tmp_path / "curves"))
    assert (
        json.loads(json.dumps(train.as_data(trainings, OPTIONS)))["reached"][0]["trainer"] == "trl"
    )


def test_decoders_are_counted_to_the_last_parameter_or_refused():
    """But for norms, biases and Cohere's norms of heads."""
    counted = set()
    for name, options in FAMILIES.values():
        if "text_config" in options:
            continue  # a model with pictures, which the plan does not count
        config = getattr(transformers, name)(**{"pad_token_id": 0, **SIZES, **options})
        with torch.device("meta"):
            weights = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
        small = ("bias", "_norm.weight")
        matrices = sum(
            w.numel() for at, w in weights.items() if w.ndim > 1 and not at.endswith(small)
        )
        with suppress(ConfigError):
            # as files leave it out
            tied = getattr(type(config)(), "tie_word_embeddings", None)
            default = {"tie_word_embeddings": tied}.items()
            fields = {
                key: value for key, value in config.to_dict().items() if (key, value) not in default
            }
            assert shapes_of(fields, "m").parameters == matrices, name
            counted.add(config.model_type)
    assert counted == set(COUNTED)
    for odd in ({"vocab_size": None}, {"num_experts": 4, "mlp_only_layers": [0]}):
        with pytest.raises(ConfigError, match=f"{next(iter(odd))}|some have none"):
            shapes_of({**MODELS["150m"].config, "model_type": "qwen3_moe", **odd}, "m")


def test_ratios_of_learners_are_between_processes_of_one_round():
    """Contract: medians of each round's own ratio. By hand: rounds of 1, 2 and 8 s for bf16 and of
    2, 2 and 4 s for w4a16 have the ratios 2, 1 and 1/2; TRL's quickest settings take 4, 1 and 2 s,
    so w4a16 has 1/2, 2 and 2.
    """

    def steps(*seconds: float) -> list[Steps]:
        return [
            Steps(
                [{"total": s, "cpu": 2 * s, "old": s / 4, "materialize": s / 50}],
                400,
                800,
                "",
            )
            for s in seconds
        ]

    found = {
        ("qarl", "bf16"): steps(1, 2, 8),
        ("qarl", "w4a16"): steps(2, 2, 4),
        ("trl", "default"): steps(4, 3, 2),
        ("trl", "no-checkpointing"): steps(8, 1, 3),
    }
    rows = {(r.trainer, r.setting): r for r in learner._rows("tiny", 10, 100, found)}
    low = rows["qarl", "w4a16"]
    assert low.seconds == 2
    assert low.against_bf16 == 1
    assert low.against_trl == 2
    assert low.cpu_seconds == 4
    assert low.tokens_per_second == 50
    assert low.materialize_share == pytest.approx(0.02)
    assert rows["trl", "default"].phases == {}
    assert rows["trl", "default"].against_trl == 1
    assert learner_table.table(list(rows.values()), "bfloat16").texts()[4:]
