"""Faults of a learner, planted in a process of `tests.support.fork_server` before its command.

`QARL_TEST_FAULT` is JSON: {"log": file for warnings, with times; "engine_dies_at": number of the
engine's `generate` call; "planted_by": module whose `plant` receives all of this}.
"""

import importlib
import itertools
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "QARL_TEST_FAULT"


def plant() -> None:
    """Plant the faults that the environment asks for."""
    if VARIABLE not in os.environ:
        return
    fault = json.loads(os.environ[VARIABLE])
    _note_warnings(Path(fault["log"]))
    if "engine_dies_at" in fault:
        _break_engine(fault["engine_dies_at"])
    if "planted_by" in fault:
        importlib.import_module(fault["planted_by"]).plant(fault)


def _note_warnings(log: Path) -> None:
    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(log, record.getMessage())

    logger = logging.getLogger("qarl.rollout.servers")
    logger.addHandler(Noted())
    logger.addHandler(logging.StreamHandler())  # as where nobody handles them


def note(log: Path, message: str) -> None:
    """Append a line with time and text to a log."""
    with log.open("a") as file:
        file.write(json.dumps({"time": time.time(), "message": message}) + "\n")


def _break_engine(call: int) -> None:
    """Let the engine's model runner raise from this `generate` call on."""
    from qarl.rollout.vllm.engine import VllmEngine

    generate = VllmEngine.generate
    calls = itertools.count(1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device fell off")

    def broken(self: VllmEngine, *arguments: Any) -> Any:
        if next(calls) == call:
            self._llm.collective_rpc(
                lambda worker: setattr(worker.model_runner, "execute_model", fail)
            )
        return generate(self, *arguments)

    VllmEngine.generate = broken  # type: ignore[method-assign]
