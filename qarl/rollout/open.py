"""The door to every engine: the one place that chooses which kind samples and serves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.configs.schema.run import RolloutConfig
from qarl.rollout.engine import Engine

if TYPE_CHECKING:
    from qarl.rollout.servers.vllm.start import ServerProcess


@contextmanager
def open_engine(
    checkpoint: Path,
    rollout: RolloutConfig,
    dtype: str,
    multi_process: bool = False,
    use_servers: bool = False,
) -> Iterator[Engine]:
    """Start an engine on a checkpoint folder; it is closed at the end of the `with`, also where the
    body fails.

    rollout: how it samples; a sequence has at most `max_prompt_tokens` + `max_new_tokens`. dtype:
    compute dtype, "bfloat16", "float16" or "float32". multi_process: this process is one of several
    with an engine each, and torch's process group is open. use_servers: connect to
    `rollout.servers` if set; else start an engine in this process. Raises `EngineError` where it
    cannot start.
    """
    engine = _start(
        checkpoint,
        rollout,
        dtype,
        multi_process,
        rollout.servers is not None and use_servers,
    )
    try:
        yield engine
    except BaseException:
        # what broke the body may have broken the engine; the first error is the one to tell
        with suppress(Exception):
            engine.close()
        raise
    engine.close()


@contextmanager
def serve_rollouts(
    checkpoint: Path,
    rollout: RolloutConfig,
    dtype: str,
    ports: Sequence[int],
    host: str,
    key: str | None,
    more: Sequence[str],
    devices: int,
) -> Iterator["Sequence[ServerProcess]"]:
    """Servers that runs of this `rollout` section can sample on, one a port, each with so many
    GPUs, ended at the end of the `with`. key: that they ask for, None for none. more: options of
    vLLM's, which win. What they print is written beside the checkpoint. Raises `EngineError` where
    one cannot start.
    """
    from qarl.rollout.servers.vllm.start import start_replicas, stop_replicas
    from qarl.rollout.vllm.options import VllmOptions

    options, logs = VllmOptions(rollout, dtype), checkpoint.parent
    replicas = start_replicas(
        checkpoint,
        options,
        ports,
        key,
        logs,
        rollout.server_seconds,
        host,
        more,
        devices,
    )
    try:
        yield replicas
    finally:
        stop_replicas(replicas)


def _start(
    checkpoint: Path,
    rollout: RolloutConfig,
    dtype: str,
    multi_process: bool,
    on_servers: bool,
) -> Engine:
    from qarl.rollout.vllm.options import VllmOptions

    options = VllmOptions(rollout, dtype, multi_process)
    if on_servers:
        from qarl.rollout.servers.open import open_servers

        return open_servers(checkpoint, options)
    from qarl.rollout.vllm.engine import VllmEngine

    return VllmEngine(checkpoint, options)
