"""Configuration: every shipped file parses, every mistake is quoted back with its remedy."""

from pathlib import Path

import pytest
import yaml

from qarl.config import ConfigError, RunConfig, field_paths, load_config
from qarl.run_folder import FIXED_FIELDS, resumed_config
from qarl.shipped import config_file, default_config, shipped_names


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_file_parses(name: str):
    assert isinstance(load_config(config_file(name), {}), RunConfig)


def test_paper_file_holds_the_papers_numbers():
    config = load_config(config_file("paper"), {})
    objective, optimizer = config.learner.objective, config.learner.optimizer
    assert (objective.epsilon_high, objective.delta_high, objective.delta_low) == (4e-4, 7e-4, 3e-4)
    correction = config.learner.correction
    assert (correction.name, correction.cap, config.rollout.samples) == ("geometric", 2.0, 8)
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("muon", 1e-6, 0.01)


def test_resolved_configuration_round_trips(tmp_path: Path):
    config = load_config(config_file("tiny-qwen3"), {"learner.optimizer.lr": "3e-4", "task.options.min_digits": "2"})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(tmp_path / "c.yaml", {}) == config
    assert config.learner.optimizer.lr == 3e-4
    assert config.task.options["min_digits"] == 2


def test_every_field_is_described():
    for path, info in field_paths().items():
        assert info.description, path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"learner.alinged": "false"}, r"unknown option --learner\.alinged; did you mean 'learner\.aligned'"),
        ({"lerner.aligned": "false"}, r"unknown option --lerner\.aligned"),
        ({"steps": "0"}, r"steps: .*greater than or equal to 1 \(given: 0\)"),
        ({"dtype": "bfloat32"}, r"dtype: .*'bfloat16' or 'float16'.*given: 'bfloat32'"),
        ({"learner.objective.name": "ppo"}, r"learner\.objective: name 'ppo' is no objective; choose one of tbpo, grpo"),
        ({"learner.mini_batches": "9", "rollout.prompts": "8"}, r"mini_batches 9 is more than rollout\.prompts 8"),
        ({"learner.micro_batch_tokens": "10"}, r"micro_batch_tokens 10 is less than one longest sequence"),
    ],
)
def test_wrong_values_are_quoted(overrides: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(config_file("tiny-qwen3"), overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner:\n  optimiser:\n    lr: 1\n", r"unknown key 'learner\.optimiser"),
        ("- 1\n", "must hold keys and values, not a list"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "c.yaml", {})


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="no configuration file 'papr', and no shipped one"):
        config_file("papr")
    with pytest.raises(ConfigError, match="cannot read configuration"):
        load_config(tmp_path / "none.yaml", {})


def test_the_default_file_follows_the_model():
    assert default_config(None).name == "tiny-qwen3.yaml"
    assert default_config("tiny-qwen3").name == "tiny-qwen3.yaml"
    assert default_config("Qwen/Qwen3-30B-A3B-Base").name == "paper.yaml"


@pytest.mark.parametrize("path", FIXED_FIELDS)
def test_a_resumed_run_keeps_what_fixes_it(path: str):
    other = {
        "model": "x/y", "scheme": "w8a8", "layers": "first:1=bf16", "dtype": "float16", "seed": "3",
        "task.name": "gcd", "task.options": "{a: 1}", "task.reward": "m:f", "rollout.prompts": "16",
        "rollout.samples": "4", "rollout.max_new_tokens": "9", "rollout.dynamic_sampling": "2",
        "learner.aligned": "false", "learner.master_dtype": "bfloat16", "learner.optimizer.name": "adamw",
    }  # fmt: skip
    file = config_file("tiny-qwen3")
    with pytest.raises(ConfigError, match=f"started with {path.replace('.', chr(92) + '.')} .* cannot be resumed"):
        resumed_config(load_config(file, {}), load_config(file, {path: other[path]}))
    longer = load_config(file, {"steps": "999"})
    assert resumed_config(load_config(file, {}), longer) is longer
