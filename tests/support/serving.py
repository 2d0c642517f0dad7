"""`qarl serve`, or vLLM's own server, as a process, and requests to it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qarl.rollout.servers.vllm.start import free_ports


def request(
    url: str,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


@contextmanager
def server(export: Path, plain: bool = False) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run the command in its own session and yield its address.

    At the end nothing of that session is left. plain: run `vllm serve FOLDER` instead, with what it
    needs on CPUs and nothing of QaRL's.
    """
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "qarl",
        "serve",
        str(export),
        "--port",
        str(port),
        "--",
    ]
    if plain:
        # the module behind `vllm serve` (qarl.rollout.servers.vllm.start)
        module = "vllm.entrypoints.openai.api_server"
        command = [sys.executable, "-m", module, "--model", str(export), "--port", str(port)]
        command += ["--served-model-name", export.name]
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(2**30)]
    command += ["--max-num-seqs", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
