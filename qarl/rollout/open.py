"""Entry point to every engine: only this module chooses which kind of engine samples and serves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qarl.configs.schema.rollout import RolloutConfig
from qarl.rollout.engine import SamplingEngine

if TYPE_CHECKING:
    from qarl.rollout.servers.vllm.start import ServerProcess


@contextmanager
def open_engine(
    checkpoint: Path,
    rollout: RolloutConfig,
    dtype: str,
    multi_process: bool = False,
    use_servers: bool = False,
) -> Iterator[SamplingEngine]:
    """Start an engine on a checkpoint folder and close it at the end of the `with`, even on errors.

    Args:
        checkpoint: Checkpoint folder.
        rollout: Sampling settings. A sequence has at most `max_prompt_tokens` + `max_new_tokens`
            tokens.
        dtype: Compute dtype: "bfloat16", "float16" or "float32".
        multi_process: Whether this process is one of several that have an engine each. Torch's
            process group is then open.
        use_servers: Connect to `rollout.servers` if that is set. Otherwise the engine runs in this
            process.

    Raises `EngineError` if the engine cannot start.
    """
    on_servers = use_servers and rollout.servers is not None
    engine = _start(checkpoint, rollout, dtype, multi_process, on_servers)
    try:
        yield engine
    except BaseException:
        # The body's error may have broken the engine, too: report the first error, not this one.
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
    """Start servers that runs with this `rollout` section can use; stop them after the `with`.

    There is one server per port, with `devices` GPUs each. Servers write their output beside the
    checkpoint. Raises `EngineError` if a server cannot start.

    Args:
        key: API key that the servers require, or None for no key.
        more: Further options of vLLM. They override the others.
    """
    from qarl.rollout.servers.vllm.start import start_replicas, stop_replicas
    from qarl.rollout.vllm.options import VllmOptions

    replicas = start_replicas(
        checkpoint,
        VllmOptions(rollout, dtype),
        ports,
        key,
        logs=checkpoint.parent,
        seconds=rollout.server_seconds,
        host=host,
        more=more,
        devices=devices,
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
) -> SamplingEngine:
    from qarl.rollout.vllm.options import VllmOptions

    options = VllmOptions(rollout, dtype, multi_process)
    if on_servers:
        from qarl.rollout.servers.open import open_servers

        return open_servers(checkpoint, options)
    from qarl.rollout.vllm.engine import VllmEngine

    return VllmEngine(checkpoint, options)
