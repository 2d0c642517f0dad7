"""From a run's `rollout` section to its servers: started with the run, or those that run already."""

import secrets
import socket
from pathlib import Path

from configs.schema.run import RolloutConfig
from rollout.engine import EngineError
from rollout.servers.access import server_key
from rollout.servers.engine import ServerEngine
from rollout.servers.start import free_ports, start_replicas, stop_replicas
from rollout.vllm.options import VllmOptions


def open_servers(checkpoint: Path, rollout: RolloutConfig, options: VllmOptions) -> ServerEngine:
    """The engine of `rollout.servers`. checkpoint: what servers of the run's own start on, in the run's folder, whose
    path is the run's name and where weight versions pass, unless `rollout.server_folder` says otherwise."""
    run, servers = checkpoint.absolute().parent, rollout.servers
    assert servers is not None
    seconds, full_every = rollout.server_seconds, rollout.server_full_every
    folder = Path(rollout.server_folder) if rollout.server_folder else run / "versions"
    learner, publishes = f"run {str(run)!r} on {socket.gethostname()}", not options.several or _is_first()
    if isinstance(servers, tuple):
        key = server_key(rollout.server_key_file)
        return ServerEngine(servers, key, folder, options, learner, publishes, seconds, full_every)
    refuse_shared_devices(servers)
    key = secrets.token_urlsafe(32)
    replicas = start_replicas(checkpoint, options, free_ports(servers), key, run / "servers", seconds)
    return ServerEngine(
        [replica.url for replica in replicas], key, folder, options, learner, publishes, seconds, full_every,
        at_end=lambda: stop_replicas(replicas),
    )  # fmt: skip


def refuse_shared_devices(servers: int) -> None:
    """Raise `EngineError` where servers of the run's own would share its GPUs."""
    import torch

    if torch.cuda.is_available():
        raise EngineError(
            f"rollout.servers {servers} would start servers on the learner's GPUs; start them on others, with "
            "`qarl serve-rollouts` and CUDA_VISIBLE_DEVICES, and give their URLs"
        )


def _is_first() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0
