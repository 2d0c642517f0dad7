"""The door to every engine: the one place that chooses which kind samples and serves."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from configs.schema.run import RolloutConfig
from rollout.engine import Engine
from rollout.types import Served


@contextmanager
def open_engine(checkpoint: Path, rollout: RolloutConfig, dtype: str, several: bool = False) -> Iterator[Engine]:
    """Start an engine on a checkpoint folder; it is closed at the end of the `with`, also where the body fails.

    rollout: how it samples; a sequence has at most `max_prompt_tokens` + `max_new_tokens`. dtype: compute dtype,
    "bfloat16", "float16" or "float32". several: this process is one of several with an engine each, and torch's process
    group is open. Raises `EngineError` where it cannot start.
    """
    engine = _start(checkpoint, rollout, dtype, several)
    try:
        yield engine
    except BaseException:
        with suppress(Exception):  # what broke the body may have broken the engine; the first error is the one to tell
            engine.close()
        raise
    engine.close()


def server_command(served: Served, host: str, port: int, more: list[str]) -> list[str]:
    """The command of an OpenAI-compatible server on a checkpoint, to be started in this process's environment, in which
    it sets what an engine's is. more: options of the server's own, which win."""
    from rollout.vllm.serve import server_command

    return server_command(served, host, port, more)


def _start(checkpoint: Path, rollout: RolloutConfig, dtype: str, several: bool) -> Engine:
    from rollout.vllm.engine import VllmEngine
    from rollout.vllm.options import vllm_options

    return VllmEngine(checkpoint, vllm_options(rollout, dtype, several))
