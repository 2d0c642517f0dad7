"""Metrics to Weights & Biases, beside metrics.jsonl and TensorBoard. Where they go, and whether offline, is said by its
own environment variables (WANDB_MODE=offline). It is in none of the locks."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig


class WandbLogger:
    """A run of the project `qarl`, named as the run's folder; a resumed run continues its own."""

    def __init__(self, config: RunConfig, run: Path):
        name = run.resolve().name
        self._run = import_module("wandb").init(
            project="qarl", name=name, id=name, resume="allow", dir=run, config=config.model_dump(mode="json")
        )

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Log a step. figures: by their names in metrics.jsonl."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def require_logger(name: str) -> None:
    """Raise `ConfigError` where the library that `log` names is not installed."""
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"log {name!r} needs the package {name}: pip install {name}")


def open_logger(config: RunConfig, run: Path) -> WandbLogger | None:
    """The one that `log` names; None for none."""
    return WandbLogger(config, run) if config.log == "wandb" else None
