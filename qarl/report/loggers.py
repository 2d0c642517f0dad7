"""Metrics to Weights & Biases, beside metrics.jsonl and TensorBoard. Where they go, and whether offline, is said by its
own environment variables (WANDB_MODE=offline). It is in none of the locks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig


def require_logger(name: str) -> None:
    """Raise `ConfigError` where the library that `log` names is not installed."""
    if name != "none" and find_spec(name) is None:
        raise ConfigError(f"log {name!r} needs the package {name}: pip install {name}")


@contextmanager
def step_logger(config: RunConfig, run: Path) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """Yields what sends a step's figures, by their names in metrics.jsonl, to where `log` says: the project `qarl`, a
    run named as the run's folder; a resumed run continues its own."""
    if config.log == "none":
        yield lambda figures, step: None
        return
    name = run.resolve().name
    logged = import_module(config.log).init(
        project="qarl", name=name, id=name, resume="allow", dir=run, config=config.model_dump(mode="json")
    )
    try:
        yield lambda figures, step: logged.log(dict(figures), step=step)
    finally:
        logged.finish()
