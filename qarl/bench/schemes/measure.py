"""All cells of a grid, each in a process of its own, some at a time; what is there already is found again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.bench.schemes.cell import Job, Measured
from qarl.bench.schemes.grid import Cell, Grid

_LAST_WORDS = 6
"""Lines of a failed cell's output that are shown; all of it is in its log."""


@dataclass(frozen=True)
class Failed:
    """A cell that gave no figures. reason: its last lines; log: where all of them are."""

    cell: Cell
    reason: str
    log: Path


def measure(grid: Grid, workers: int, console: Console) -> tuple[dict[Cell, Measured], list[Failed]]:
    """Figures by cell, and the cells that failed. grid: `checked`. workers: cells at a time, a CPU core or a GPU each.

    Cells that were measured before are read. What comes by post-training quantization waits for all that is trained.
    Raises `KeyboardInterrupt` once every child has saved a checkpoint and ended; the same command goes on from there.
    """
    grid.runs.mkdir(parents=True, exist_ok=True)
    cells = grid.cells()
    found = {cell: measured for cell in cells if (measured := _read(grid.record(cell))) is not None}
    missing = [cell for cell in cells if cell not in found]
    console.print(f"{len(cells)} cells, {len(found)} of them measured before, {workers} at a time", highlight=False)
    failed: list[Failed] = []
    with _interruptible():
        for trained in (True, False):
            wanted = [cell for cell in missing if (cell.trained == cell) == trained]
            for cell, outcome in _Children(grid, workers, console).run(wanted):
                if isinstance(outcome, Failed):
                    failed.append(outcome)
                else:
                    found[cell] = outcome
    return {cell: found[cell] for cell in cells if cell in found}, failed


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is as Ctrl-C, and both count where a shell started this in the background, with SIGINT ignored: no child
    is left behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _Children:
    """Runs cells in child processes, `workers` at a time."""

    def __init__(self, grid: Grid, workers: int, console: Console):
        self._grid, self._workers, self._console = grid, workers, console
        self._running: set[subprocess.Popen[bytes]] = set()
        self._places = list(range(workers))
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, cells: list[Cell]) -> list[tuple[Cell, Measured | Failed]]:
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._one, cell) for cell in cells]
            try:
                return [(cell, future.result()) for cell, future in zip(cells, futures, strict=True)]
            except KeyboardInterrupt:
                with self._lock:
                    self._stopped = True
                    for child in self._running:
                        child.send_signal(signal.SIGINT)
                pool.shutdown(cancel_futures=True)
                raise

    def _one(self, cell: Cell) -> Measured | Failed:
        start, log = time.monotonic(), self._grid.runs / f"{cell.name}.log"
        command = [sys.executable, "-m", "qarl.bench.schemes.cell", Job(cell, self._grid).as_argument()]
        with log.open("wb") as output:
            with self._lock:
                if self._stopped:
                    return Failed(cell, "interrupted before it began", log)
                place = self._places.pop()
                # A session of its own: a terminal's Ctrl-C reaches the children once, through `run`.
                child = subprocess.Popen(
                    command, env=_environment(place, self._workers), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                self._running.add(child)
            status = child.wait()
        with self._lock:
            self._running.discard(child)
            self._places.append(place)
        measured = _read(self._grid.record(cell)) if status == 0 else None
        seconds = time.monotonic() - start
        if measured is None:
            words = log.read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:]
            self._console.print(
                f"{cell.name}: failed with exit status {status} ({log})", highlight=False, soft_wrap=True
            )
            return Failed(cell, "\n".join(words), log)
        self._console.print(f"{cell.name}: {measured.accuracy:.1%} in {seconds:.0f} s", highlight=False)
        return measured


def _environment(place: int, workers: int) -> dict[str, str]:
    """A core or a GPU each: threads are shared out, and device `place` of those there are."""
    environment = dict(os.environ)
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment.setdefault("OMP_NUM_THREADS", threads)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    devices = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or _gpus()
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    return environment


def _gpus() -> list[str]:
    import torch

    return [str(device) for device in range(torch.cuda.device_count())]


def _read(record: Path) -> Measured | None:
    """A finished cell's figures; None where it is not finished."""
    tree: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {}
    return Measured(**tree["measured"]) if "measured" in tree else None
