"""Runs what is left of all cells: each command in its own process, several cells at a time."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml
from rich.console import Console

from qarl.compare.comparison import Cell, Comparison
from qarl.planning.machine import visible_gpus
from qarl.report.run_folder import with_absolute_paths
from qarl.run.interrupt import handled, heeded_signals, interrupt

Commands = list[list[str]]
"""Arguments of `qarl`, in order."""

_LAST_WORDS = 6
"""Number of last lines of a failed cell's output that are shown; its log has all."""
_SILENT = 60.0
"""Interval in seconds at which a running cell's last step is shown."""


@dataclass(frozen=True)
class Failed:
    """A cell that failed."""

    cell: Cell
    reason: str
    """Last lines of its output, or the system's error."""
    log: Path
    """File with all of its output."""


def run_cells(
    comparison: Comparison,
    left: Mapping[Cell, Commands],
    workers: int,
    console: Console,
) -> list[Failed]:
    """Run what is left of each cell, `workers` at a time, and return the cells that failed.

    Workers share the CPU cores and GPUs. Cells that are quantized wait for all that are trained. On
    Ctrl-C, every child saves a checkpoint and ends, then `KeyboardInterrupt` is raised; the same
    command continues from there.
    """
    comparison.output.mkdir(parents=True, exist_ok=True)
    pending = {cell: commands for cell, commands in left.items() if commands}
    done = len(left) - len(pending)
    console.print(
        f"{len(left)} cells, {done} of them finished before, {workers} at a time",
        highlight=False,
    )
    failed: list[Failed] = []
    # A scheduler's signals act as Ctrl-C, which is handled even if a shell started this in the
    # background, where SIGINT is ignored: no child must be left behind.
    with handled(dict.fromkeys(heeded_signals(), interrupt)):
        for quantized in (False, True):
            part = {
                cell: commands
                for cell, commands in pending.items()
                if bool(cell.variant.quantized) == quantized
            }
            failed += _Children(comparison, workers, console).run(part)
    return failed


class _Children:
    """Runs cells in child processes, `workers` at a time."""

    def __init__(self, comparison: Comparison, workers: int, console: Console):
        self._comparison = comparison
        self._workers = workers
        self._console = console
        self._running: set[subprocess.Popen[bytes]] = set()
        self._free_slots = list(range(workers))
        """Indices of workers that run nothing; each has its share of cores and GPUs."""
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, left: Mapping[Cell, Commands]) -> list[Failed]:
        with ThreadPoolExecutor(self._workers) as pool:
            try:  # includes `submit`: the first child may run before the last cell is submitted
                futures = [
                    pool.submit(self._run_cell, cell, commands) for cell, commands in left.items()
                ]
                return [failed for future in futures if (failed := future.result()) is not None]
            except KeyboardInterrupt:
                with self._lock:
                    self._stopped = True
                    for child in self._running:
                        child.send_signal(signal.SIGINT)
                pool.shutdown(cancel_futures=True)
                raise

    def _run_cell(self, cell: Cell, commands: Commands) -> Failed | None:
        start = time.monotonic()
        log = self._comparison.output / f"{cell.name}.log"
        self._console.print(
            f"{cell.name}: begins; its output: {log}", highlight=False, soft_wrap=True
        )
        try:
            with log.open("wb") as output:
                for command in commands:
                    self._make_room(cell, command)
                    status = self._run_command(command, output)
                    if status != 0:
                        outcome = (
                            "stopped" if self._stopped else f"failed with exit status {status}"
                        )
                        self._console.print(f"{cell.name}: {outcome}", highlight=False)
                        lines = log.read_text(errors="replace").strip().splitlines()
                        return Failed(cell, "\n".join(lines[-_LAST_WORDS:]), log)
        # Such as a full disk, or no further process: this cell fails, and the others go on.
        except OSError as error:
            return Failed(cell, str(error), log)
        self._console.print(
            f"{cell.name}: done in {time.monotonic() - start:.0f} s", highlight=False
        )
        return None

    def _make_room(self, cell: Cell, command: list[str]) -> None:
        """Prepare a command that starts from scratch.

        Remove what a killed command left, and write the configuration that the command names.
        """
        if command[0] == "export" or command[:2] == ["train", "--config"]:
            shutil.rmtree(self._comparison.folder(cell), ignore_errors=True)
        if command[:2] == ["train", "--config"]:
            tree = with_absolute_paths(self._comparison.run_config(cell)).model_dump(mode="json")
            Path(command[2]).write_text(yaml.safe_dump(tree, sort_keys=False))

    def _run_command(self, command: list[str], output: IO[bytes]) -> int:
        with self._lock:
            if self._stopped:
                return 130
            # In a new session, so that a terminal's Ctrl-C reaches the children only through `run`.
            child = subprocess.Popen(
                [sys.executable, "-m", "qarl", *command],
                env=_environment(self._free_slots[-1], self._workers),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            slot = self._free_slots.pop()
            self._running.add(child)
        status = self._wait(child, Path(output.name))
        with self._lock:
            self._running.discard(child)
            self._free_slots.append(slot)
        return status

    def _wait(self, child: subprocess.Popen[bytes], log: Path) -> int:
        """Wait for a child and return its exit status; meanwhile show its last step regularly."""
        while True:
            try:
                return child.wait(_SILENT)
            except subprocess.TimeoutExpired:
                steps = re.findall("^step .*", log.read_text(errors="replace"), re.MULTILINE)
                if steps:
                    self._console.print(f"{log.stem}: {steps[-1]}", highlight=False, soft_wrap=True)


def _environment(slot: int, workers: int) -> dict[str, str]:
    """Return the environment of a worker's processes, with its share of the cores and GPUs.

    A single worker has all of them.
    """
    environment = dict(os.environ)
    if workers == 1:
        return environment
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    devices = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    devices = devices or [gpu.index for gpu in visible_gpus()]
    share = max(1, len(devices) // workers)
    if devices:
        first = slot * share % len(devices)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + share])
    return environment
