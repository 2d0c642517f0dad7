"""`qarl train --processes N`: the same command in N processes of this machine.

It does what `torchrun --nproc-per-node N` does, with one difference that matters here: Ctrl-C
reaches every process once, so that the step in hand is finished and a checkpoint written. On
several machines use torchrun or deepspeed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial

import torch

from qarl.configs.errors import ConfigError, InputError
from qarl.learner.processes import RENDEZVOUS
from qarl.quant.runtime.parent import end_with_the_parent
from qarl.rollout.servers.vllm.start import free_ports
from qarl.run.interrupt import handled

REFUSED = InputError.exit_status
_PATIENCE = 20.0
"""Seconds the others have to stop after one process died, before they are killed."""


def check_count(count: int) -> None:
    """Raise `ConfigError` for a number of processes that this machine cannot run."""
    gpus = torch.cuda.device_count()
    if gpus and count > gpus:
        raise ConfigError(
            f"--processes {count} cannot run on this machine; allowed are 1 to {gpus}, one a GPU"
        )


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `qarl ARGUMENTS` in `count` processes and return the exit status of the first that
    failed, else 0.

    Where one dies, the others are stopped within half a minute: they would wait for it for ever;
    all of them stop where this one is killed. They meet in a file: torch's own meeting point
    listens on every interface.
    """
    with tempfile.TemporaryDirectory(prefix="qarl-") as folder:
        place = {
            RENDEZVOUS: f"{folder}/rendezvous",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "OMP_NUM_THREADS": (
                os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
            ),
        }
        command = [sys.executable, "-m", "qarl", *arguments]
        environments = [
            {**os.environ, **place, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(count)
        ]
        processes = [
            subprocess.Popen(command, env=e, preexec_fn=end_with_the_parent) for e in environments
        ]
        # A terminal sends Ctrl-C to all processes of the foreground job; ours have it already.
        pass_on = partial(_send, processes)
        with handled(
            {
                signal.SIGINT: signal.SIG_IGN if sys.stdin.isatty() else pass_on,
                signal.SIGTERM: pass_on,
            }
        ):
            return _wait(processes)


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int, _frame: object = None) -> None:
    """Send those that have not ended a signal."""
    for process in processes:
        process.send_signal(number)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all ended, or one failed and the others were stopped."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            _stop(processes)
            if any(process.returncode == REFUSED for process in processes):
                # told by the process that looked; the others failed with it, with status 1
                return REFUSED
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Those that fail by themselves in a moment say why first; then SIGTERM, and after `_PATIENCE`
    SIGKILL.
    """
    for patience, number in ((2.0, signal.SIGTERM), (_PATIENCE, signal.SIGKILL)):
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        _send(processes, number)
