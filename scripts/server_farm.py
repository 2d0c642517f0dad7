"""Two real servers behind proxies, shared by many runs with faults."""

import contextlib
import json
import os
import queue
import resource
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from qarl.rollout.servers.vllm.client import GENERATE
from qarl.rollout.servers.vllm.start import free_ports, start_replicas, stop_replicas
from qarl.rollout.vllm.options import VllmOptions
from tests.support.fault_proxy import Proxy

KEY = "the servers' key"


class Farm:
    """Two servers, each behind a proxy, that outlive runs.

    Put work for the main thread into `todo`: a process must be started by a thread that lives as
    long as the process.
    """

    def __init__(self, checkpoint: Path, options: VllmOptions, logs: Path):
        self.checkpoint = checkpoint
        self.options = options
        self._logs = logs
        self.todo: queue.Queue[Callable[[], None]] = queue.Queue()
        ports = free_ports(2)
        self.servers = start_replicas(checkpoint, options, ports, KEY, logs, seconds=300)
        self.proxies = [Proxy(server.url) for server in self.servers]

    def urls(self) -> str:
        """Return the addresses for a run's `rollout.servers`."""
        return ",".join(proxy.url for proxy in self.proxies)

    def engine(self, number: int) -> psutil.Process:
        """Return the process that holds the server's model."""
        return psutil.Process(self.servers[number].process.pid).children(recursive=True)[-1]

    def kill(self, number: int) -> None:
        """Kill the server and all its processes at once."""
        os.killpg(self.servers[number].process.pid, signal.SIGKILL)
        self.servers[number].process.wait()

    def restart(self, number: int) -> None:
        """End the server, and start one on its port with the initial weights."""
        dead = self.servers[number]
        stop_replicas([dead])
        port = int(dead.url.rpartition(":")[2])
        logs = self._logs / f"{number}-{time.time():.0f}"
        (self.servers[number],) = start_replicas(
            self.checkpoint, self.options, [port], KEY, logs, seconds=300
        )
        warm(dead.url)

    def make_sound(self) -> None:
        """Restore both servers for the next run: alive, unclaimed and not stopped."""
        for proxy in self.proxies:
            proxy.reset(None)
        for number, server in enumerate(self.servers):
            with contextlib.suppress(psutil.Error, IndexError):
                engine = self.engine(number)
                engine.send_signal(signal.SIGCONT)
                engine.rlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            try:
                _post(server.url, "/collective_rpc", {"method": "qarl_release"})
                _post(server.url, "/resume")
            except (OSError, urllib.error.URLError):
                self.restart(number)

    def close(self) -> None:
        """End all servers and proxies."""
        for proxy in self.proxies:
            proxy.close()
        stop_replicas(self.servers)


def warm(url: str) -> None:
    """Send the first request of each kind.

    They compile, which takes longer than a run's timeout here.
    """
    for parameters in (
        {"max_tokens": 8, "logprobs": 0},
        {"max_tokens": 1, "prompt_logprobs": 0},
    ):
        _post(
            url,
            GENERATE,
            {"token_ids": list(range(16, 40)), "sampling_params": parameters},
            240,
        )


def _post(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    seconds: float = 20,
) -> None:
    request = urllib.request.Request(
        f"{url}{path}", data=json.dumps(body or {}).encode(), method="POST"
    )
    request.add_header("Authorization", f"Bearer {KEY}")
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request, timeout=seconds).read()
