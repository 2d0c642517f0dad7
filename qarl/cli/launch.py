"""`qarl train --processes N`: run the same command in N processes of this machine.

This does what `torchrun --nproc-per-node N` does, with one difference: a signal that stops a run is
passed on to every process, so that the current step is finished and a checkpoint written. On
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
from typing import Any

import torch

from qarl.configs.errors import ConfigError, InputError
from qarl.learner.processes import RENDEZVOUS
from qarl.quant.runtime.parent import end_with_the_parent
from qarl.rollout.servers.vllm.start import free_ports
from qarl.run.interrupt import handled, heeded_signals

REFUSED = InputError.exit_status
_REPORT_SECONDS = 2.0
"""Seconds that the other processes have to report why they fail after one died, before they are
killed.
"""
_PATIENCE = 20.0
"""Seconds that the other processes have to end after one was stopped by a signal."""


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

    If one dies, the others are stopped within half a minute, because they would wait for it for
    ever. If this process is killed, all of them stop. Their rendezvous is a file, because torch's
    own listens on every network interface.
    """
    with tempfile.TemporaryDirectory(prefix="qarl-") as folder:
        shared = {
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
            {**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(count)
        ]
        processes = [
            subprocess.Popen(command, env=e, preexec_fn=end_with_the_parent) for e in environments
        ]
        handlers: dict[int, Any] = dict.fromkeys(heeded_signals(), partial(_send, processes))
        # A terminal sends Ctrl-C to all processes of the foreground job, so it is not passed on.
        if sys.stdin.isatty():
            handlers[signal.SIGINT] = signal.SIG_IGN
        with handled(handlers):
            return _wait(processes)


def _send(
    processes: Sequence[subprocess.Popen[bytes]],
    number: int,
    _frame: object = None,
) -> None:
    """Send a signal to the processes that have not ended."""
    for process in processes:
        process.send_signal(number)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes ended, or one failed and the others were stopped. Return the exit
    status.
    """
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            # those that were stopped by a signal may still be writing what they have
            _stop(processes, _PATIENCE if failed > 128 else _REPORT_SECONDS)
            if any(process.returncode == REFUSED for process in processes):
                # the process that found the fault; the others failed with it, with status 1
                return REFUSED
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _stop(processes: Sequence[subprocess.Popen[bytes]], patience: float) -> None:
    """Wait for the processes for `patience` seconds, and kill those that have not ended by then.

    They may be in a collective with one that is gone, where no other signal is heard.
    """
    deadline = time.monotonic() + patience
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    _send(processes, signal.SIGKILL)
    for process in processes:
        process.wait()
