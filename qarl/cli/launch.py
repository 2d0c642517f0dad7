"""`qarl train --processes N`: run the same command in N processes of this machine.

This does what `torchrun --nproc-per-node N` does, with one difference: Ctrl-C reaches every process
once, so that the current step is finished and a checkpoint written. On several machines use
torchrun or deepspeed.
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
"""Seconds that the other processes have to stop after one died, before they are killed."""


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
        # A terminal sends Ctrl-C to all processes of the foreground job, so it is not passed on.
        pass_on = partial(_send, processes)
        with handled(
            {
                signal.SIGINT: signal.SIG_IGN if sys.stdin.isatty() else pass_on,
                signal.SIGTERM: pass_on,
            }
        ):
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
            _stop(processes)
            if any(process.returncode == REFUSED for process in processes):
                # the process that found the fault; the others failed with it, with status 1
                return REFUSED
            return failed if failed > 0 else 128 - failed
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop the processes. Those about to fail by themselves get 2 s to report why; then SIGTERM is
    sent, and after `_PATIENCE` SIGKILL.
    """
    for patience, number in ((2.0, signal.SIGTERM), (_PATIENCE, signal.SIGKILL)):
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        _send(processes, number)
