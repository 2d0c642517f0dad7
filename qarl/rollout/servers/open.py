"""Open the servers of a run's `rollout` section: start its own, or connect to running ones."""

import gc
import hashlib
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from qarl.rollout.engine import EngineError
from qarl.rollout.servers.engine import ServerEngine
from qarl.rollout.servers.vllm.access import server_key
from qarl.rollout.servers.vllm.start import (
    ServerProcess,
    free_ports,
    start_replicas,
    stop_replicas,
)
from qarl.rollout.vllm.options import VllmOptions


def open_servers(checkpoint: Path, options: VllmOptions) -> ServerEngine:
    """Return the engine of `rollout.servers`.

    checkpoint: the folder that the run's own servers start on. It lies in the run's folder, which
    also holds the run's name, and the weight versions unless `rollout.server_folder` is set.

    Raises `EngineError` if the run's own servers would share its GPUs.
    """
    run = checkpoint.absolute().parent
    rollout = options.rollout
    servers = rollout.servers
    assert servers is not None
    learner = run_name(run)
    publishes = not options.multi_process or dist.get_rank() == 0
    if rollout.server_folder:
        folder = Path(rollout.server_folder) / _folder_name(run, learner)
    else:
        folder = run / "versions"
    # Answers are many small objects, so that garbage is collected at each call. Freezing what is
    # loaded keeps the collector from walking it each time.
    gc.collect()
    gc.freeze()
    started: list[ServerProcess] = []
    all_threads = torch.get_num_threads()
    threads = None
    if isinstance(servers, tuple):
        urls = servers
        key = server_key(rollout.server_key_file)
    elif torch.cuda.is_available():
        raise EngineError(
            f"rollout.servers {servers} would start servers on the learner's GPUs; start them on"
            " others, with `qarl serve-rollouts` and CUDA_VISIBLE_DEVICES, and give their URLs"
        )
    else:
        key = secrets.token_urlsafe(32)
        ports = free_ports(servers)
        # With staleness learner and servers work at the same time, so they share the cores.
        if rollout.max_staleness and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, all_threads // (1 + servers))
        started = start_replicas(
            checkpoint,
            options,
            ports,
            key,
            run / "servers",
            rollout.server_seconds,
            threads=threads,
        )
        urls = [server.url for server in started]

    def end() -> None:
        stop_replicas(started)
        torch.set_num_threads(all_threads)

    engine = ServerEngine(urls, key, folder, checkpoint, options, learner, publishes, at_end=end)
    torch.set_num_threads(threads or all_threads)
    return engine


def run_name(run: Path) -> str:
    """Return the name by which servers know a run.

    It is drawn when the run begins and stored in its folder `run`, so that a run keeps its name
    when it is resumed on another machine.
    """
    file = run / "servers" / "run"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        drawn = file.with_name(f"run-{secrets.token_hex(8)}")
        drawn.write_text(
            f"run {str(run)!r}, begun on {socket.gethostname()} ({secrets.token_hex(4)})"
        )
        # If processes begin at the same time, the first one's name is everybody's.
        with suppress(FileExistsError):
            os.link(drawn, file)
        drawn.unlink()
    return file.read_text()


def _folder_name(run: Path, learner: str) -> str:
    """Return the name of a run's own subfolder in a folder that runs share."""
    return f"{run.name}-{hashlib.sha256(learner.encode()).hexdigest()[:8]}"
