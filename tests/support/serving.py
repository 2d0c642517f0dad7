"""`qarl serve`, or vLLM's own server, as a process, and requests to it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from qarl.rollout.servers.vllm.start import free_ports, is_ready


def request(
    url: str,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


@contextmanager
def server(
    export: Path,
    plain: bool = False,
    python: Path | None = None,
    log: Path | None = None,
    more: Sequence[str] = (),
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run `qarl serve` in its own session and yield its address.

    At the end nothing of that session is left.

    Args:
        export: Folder to serve.
        plain: Run `vllm serve FOLDER` instead, with what it needs on CPUs and nothing of QaRL's.
        python: Interpreter of another environment, which runs without this one's variables.
        log: File of what the process prints. Default: its output is a pipe.
        more: Further options of vLLM.
    """
    (port,) = free_ports(1)
    interpreter = str(python or sys.executable)
    command = [interpreter, "-m", "qarl", "serve", str(export), "--port", str(port), "--"]
    if plain:
        # the module behind `vllm serve` (qarl.rollout.servers.vllm.start)
        module = "vllm.entrypoints.openai.api_server"
        command = [interpreter, "-P", "-m", module, "--model", str(export), "--port", str(port)]
        command += ["--served-model-name", export.name]
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(2**30)]
    command += ["--max-num-seqs", "4", *more]
    env = dict(os.environ)
    if python is not None:
        env = {n: v for n, v in env.items() if not n.startswith(("PYTHONPATH", "VLLM_", "QARL_"))}
    with ExitStack() as stack:
        out = subprocess.PIPE if log is None else stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            command,
            env=env,
            stdout=out,
            stderr=None if log is None else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait(url: str, process: "subprocess.Popen[str]", seconds: float = 600) -> None:
    """Return when the server answers. Fails if it ends first or takes too long."""
    deadline = time.monotonic() + seconds
    while not is_ready(url):
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.2)
