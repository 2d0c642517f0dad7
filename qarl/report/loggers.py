"""Logging of metrics to Weights & Biases, in addition to metrics.jsonl and TensorBoard.

Its own environment variables configure it, such as WANDB_MODE=offline. None of the lock files has
the package.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.report.startup import say

SendMetrics = Callable[[Mapping[str, float], int], None]
"""Function that sends the figures of a step, given by their names in metrics.jsonl."""


def send_nowhere(figures: Mapping[str, float], step: int) -> None:
    """Send nothing; the `SendMetrics` of a run without a tracker."""


@contextmanager
def step_logger(config: RunConfig, run: Path, first: bool = True) -> Iterator[SendMetrics]:
    """Connect to the tracker that `log` names, and yield a function that sends a step's figures.

    Figures go to the project `qarl`, to a run named after the run's folder, which a resumed run
    continues. If sending fails, one warning is printed and the run goes on without the tracker.

    first: whether this is the first process; the others send nothing.

    Raises `ConfigError` if the tracker cannot start, for example without a login.
    """
    if config.log == "none" or not first:
        yield send_nowhere
        return
    name = run.resolve().name
    try:
        logged: Any = import_module(config.log).init(
            project="qarl",
            name=name,
            id=name,
            resume="allow",
            dir=run,
            config=config.model_dump(mode="json"),
        )
    except Exception as error:
        raise ConfigError(
            f"log {config.log!r} cannot begin: {error}; log in ({config.log} login), set"
            " WANDB_MODE=offline, or leave log out"
        ) from error
    failed = False

    def attempt(send: Callable[[], object], when: str) -> None:
        nonlocal failed
        try:
            if not failed:
                send()
        except Exception as error:
            failed = True
            say(f"warning, {when}: log {config.log!r} failed: {error}; the run goes on without it")

    try:
        yield lambda figures, step: attempt(
            lambda: logged.log(dict(figures), step=step), f"step {step}"
        )
    finally:
        attempt(logged.finish, "at the end")
