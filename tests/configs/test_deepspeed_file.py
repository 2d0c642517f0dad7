"""Tests of `learner.deepspeed`: what a run takes of a user's file, and what it refuses by name."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from qarl.configs.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from qarl.configs.errors import ConfigError
from qarl.configs.load import load_config

USUAL: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""A file as trainers that fill in "auto" document it."""

REFUSED: list[tuple[str, Any, str]] = [
    ("fp16", {"enabled": True, "loss_scale": 0}, '"loss_scale": 0} is refused: codes would'),
    ("gradient_clipping", 1.0, "set learner.optimizer.grad_clip"),
    ("optimizer", {"type": "AdamW", "params": {"lr": 1e-5}}, "set learner.optimizer"),
    ("optimizer", {"type": "Lamb", "params": {"lr": "auto"}}, "set learner.optimizer"),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}, "warmup_steps"),
    ("gradient_accumulation_steps", 4, "learner.mini_batches"),
    ("communication_data_type", "fp16", "added in float32"),
    ("sparse_attention", {"mode": "fixed"}, "a run takes comms_logger"),
    ("zero_optimization.stage", 0, "divides nothing"),
    ("zero_optimization.stage", 3, "frees masters"),
    ("zero_optimization.stage", True, "take 1 or 2"),
    ("zero_optimization.offload_param", {"device": "cpu"}, "of stage 3"),
    ("zero_optimization.stage3_max_live_parameters", 1e9, "it is of stage 3, and this run"),
    ("zero_optimization.cpu_offload", True, "offload_optimizer now"),
    ("zero_optimization.zero_quantized_gradients", True, "rounds gradients"),
    ("zero_optimization.mics_shard_size", 4, "a run takes allgather_bucket_size"),
    ("zero_optimization.offload_optimizer", {"device": "nvme"}, "take cpu or none"),
    ("zero_optimization.offload_optimizer", {"device": "cpu", "nvme_path": "/x"}, "of NVMe"),
]


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(content))
    return path


def test_a_usual_file_keeps_what_divides_and_sends(tmp_path: Path):
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
    }
    kept = {"zero_optimization": zero, "steps_per_print": 2000, "wall_clock_breakdown": False}
    assert read_deepspeed_file(written(tmp_path, USUAL)) == DeepSpeedFile(2, True, kept)


@pytest.mark.parametrize(("key", "value", "said"), REFUSED)
def test_a_key_that_would_change_a_number_is_refused_by_name(
    tmp_path: Path, key: str, value: Any, said: str
):
    """Contract: wherever it stands in the file, with its value and what takes its place."""
    keys = list(USUAL)
    random.Random(key + said).shuffle(keys)
    content = json.loads(json.dumps({name: USUAL[name] for name in keys}))
    section = content
    *path, last = key.split(".")
    for name in path:
        section = section[name]
    section[last] = value
    with pytest.raises(ConfigError, match=f"learner.deepspeed: {key}") as caught:
        read_deepspeed_file(written(tmp_path, content))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is no JSON"), ("[1]", "has a list"), ("{}", "zero_optimization.stage null")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str, said: str):
    path = tmp_path / "deepspeed.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_deepspeed_file(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read learner\.deepspeed .*none\.json"):
        read_deepspeed_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("learner.optimizer.name", "muon"),
        ("learner.optimizer.offload", "cpu"),
        ("learner.master_dtype", "bfloat16"),
        ("learner.reduce_dtype", "bfloat16"),
    ],
)
def test_options_of_the_learners_own_optimizer_are_refused(option: str, value: str):
    fields = {"model": "m", "learner.optimizer.name": "adamw", "learner.deepspeed": "d.json"}
    with pytest.raises(ConfigError, match=f"with {option} '{value}'"):
        load_config(None, {**fields, option: value})
