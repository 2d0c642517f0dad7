"""From a run's `rollout` section to its servers: started with the run, or those that run
already.
"""

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
    """The engine of `rollout.servers`. checkpoint: what servers of the run's own start on, in the
    run's folder, where its name is kept and weight versions are written, unless
    `rollout.server_folder` says otherwise. Raises `EngineError` where servers of the run's own
    would share its GPUs.
    """
    run, rollout, servers = (
        checkpoint.absolute().parent,
        options.rollout,
        options.rollout.servers,
    )
    assert servers is not None
    learner, publishes = (
        run_name(run),
        not options.multi_process or dist.get_rank() == 0,
    )
    folder = (
        Path(rollout.server_folder) / _folder_name(run, learner)
        if rollout.server_folder
        else run / "versions"
    )
    # Answers are many small objects, which have garbage collected at each call: it need not walk
    # all that was loaded.
    gc.collect()
    gc.freeze()
    started: list[ServerProcess] = []
    before, threads = torch.get_num_threads(), None
    if isinstance(servers, tuple):
        urls, key = servers, server_key(rollout.server_key_file)
    elif torch.cuda.is_available():
        raise EngineError(
            f"rollout.servers {servers} would start servers on the learner's GPUs; start them on"
            " others, with `qarl serve-rollouts` and CUDA_VISIBLE_DEVICES, and give their URLs"
        )
    else:
        key, ports = secrets.token_urlsafe(32), free_ports(servers)
        # of processes that work at one time
        divides = rollout.max_staleness and "OMP_NUM_THREADS" not in os.environ
        threads = max(1, before // (1 + servers)) if divides else None
        start = checkpoint, options, ports, key, run / "servers", rollout.server_seconds
        started = start_replicas(*start, threads=threads)
        urls = [server.url for server in started]

    def end() -> None:
        stop_replicas(started)
        torch.set_num_threads(before)

    engine = ServerEngine(urls, key, folder, checkpoint, options, learner, publishes, at_end=end)
    torch.set_num_threads(threads or before)
    return engine


def run_name(run: Path) -> str:
    """What servers know a run by: drawn where it begins and kept in its folder, so that a run that
    is resumed on another machine is the same. run: the folder.
    """
    file = run / "servers" / "run"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        drawn = file.with_name(f"run-{secrets.token_hex(8)}")
        drawn.write_text(
            f"run {str(run)!r}, begun on {socket.gethostname()} ({secrets.token_hex(4)})"
        )
        with suppress(FileExistsError):  # processes that begin at once have one name
            os.link(drawn, file)
        drawn.unlink()
    return file.read_text()


def _folder_name(run: Path, learner: str) -> str:
    """Of a run's own folder in one that runs share."""
    return f"{run.name}-{hashlib.sha256(learner.encode()).hexdigest()[:8]}"
