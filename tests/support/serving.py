"""`qarl serve` as a process, and requests to it."""

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
def server(export: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run the command in its own session and yield its address.

    At the end nothing of that session is left.
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
        "--max-num-seqs",
        "4",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
