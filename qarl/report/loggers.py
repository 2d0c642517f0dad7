"""Metrics to Weights & Biases or MLflow, beside metrics.jsonl and TensorBoard. Where they go, and whether offline, is
said by environment variables of their own (WANDB_MODE=offline, MLFLOW_TRACKING_URI). Neither is in the locks."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig

_INSTALLED = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Module → the package that has it."""


class Logger(Protocol):
    """Takes a step's figures."""

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """figures: by their names in metrics.jsonl."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


def require_logger(name: str) -> None:
    """Raise `ConfigError` where the library that `log` names is not installed."""
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"log {name!r} needs the package {_INSTALLED[name]}: pip install {_INSTALLED[name]}")


def open_logger(config: RunConfig, run: Path) -> Logger | None:
    """The one that `log` names, with the run's configuration; None for none. A resumed run goes on in its own."""
    kinds: dict[str, Callable[[RunConfig, Path], Logger]] = {"wandb": _Wandb, "mlflow": _Mlflow}
    return kinds[config.log](config, run) if config.log in kinds else None


class _Wandb:
    def __init__(self, config: RunConfig, run: Path):
        name = run.resolve().name
        self._run = import_module("wandb").init(
            project="qarl", name=name, id=name, resume="allow", dir=run, config=config.model_dump(mode="json")
        )

    def write(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, config: RunConfig, run: Path):
        name, mlflow = run.resolve().name, import_module("mlflow")
        mlflow.set_experiment("qarl")
        found = mlflow.search_runs(filter_string=f"attributes.run_name = '{name}'", output_format="list")
        self._mlflow = mlflow
        mlflow.start_run(run_id=found[0].info.run_id if found else None, run_name=name)
        if not found:
            mlflow.log_dict(config.model_dump(mode="json"), "config.yaml")

    def write(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
