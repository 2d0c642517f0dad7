"""Metrics to Weights & Biases, beside metrics.jsonl and TensorBoard. Where they go, and whether
offline, is said by its own environment variables (WANDB_MODE=offline). It is in none of the locks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.report.startup import say

Log = Callable[[Mapping[str, float], int], None]
"""Sends a step's figures, by their names in metrics.jsonl."""


def unlogged(figures: Mapping[str, float], step: int) -> None:
    """A `Log` that sends nothing."""


@contextmanager
def step_logger(config: RunConfig, run: Path, first: bool = True) -> Iterator[Log]:
    """Yields what sends figures to where `log` says: the project `qarl`, a run named as the run's
    folder; a resumed run continues its own. Where sending fails, that is said once and the run goes
    on without. first: whether this is the first process; the others send nothing. Raises
    `ConfigError` where it cannot begin, as without a login.
    """
    if config.log == "none" or not first:
        yield unlogged
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
