"""What is left to run of each cell, as commands of `qarl`, each in a process of its own, some at a time."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from qarl.compare.comparison import Cell, Comparison
from qarl.configs.errors import ConfigError
from qarl.configs.schema.run import RunConfig
from qarl.report.located import located
from qarl.report.run_folder import RunFolder
from qarl.run.export_note import is_finished, read_note

_LAST_WORDS = 6
"""Lines of a failed cell's output that are shown; all of it is in its log."""

_PLANNED = {
    ("rollout", "kv_cache_gib"): None,
    ("learner", "gradient_checkpointing"): "auto",
    ("learner", "compile"): "auto",
}
"""Fields that `qarl.plan` decides where they have this value; `qarl train` records what it decided."""


@dataclass(frozen=True)
class Failed:
    """A cell that gave no figures. reason: its last lines; log: where all of them are."""

    cell: Cell
    reason: str
    log: Path


def existing_run(config: RunConfig) -> RunFolder | None:
    """The run in `config.output`, finished or not; None where there is none.

    Raises `ConfigError` where a run of another configuration has that place.
    """
    path = Path(str(config.output))
    if not path.exists():
        return None
    folder = RunFolder.open(path)
    here, there = (located(each).model_dump(mode="json", exclude={"output"}) for each in (config, folder.config()))
    for (section, field), undecided in _PLANNED.items():
        if here[section][field] == undecided:
            there[section][field] = undecided
    for key, value in here.items():
        if there[key] != value:
            raise ConfigError(
                f"run {str(path)!r} has {key} {there[key]!r} where {value!r} is wanted; choose another --output, or "
                "remove that one"
            )
    return folder


def evaluation_file(comparison: Comparison, cell: Cell, options: Sequence[str] = ()) -> Path:
    """Where `qarl eval` with these options writes what it measured of a cell."""
    named = "-".join(["eval", *(option.removeprefix("--").replace("/", "_") for option in options)])
    return comparison.output / f"{cell.name}.{named}.json"


def evaluation_options(comparison: Comparison) -> list[str]:
    """`evaluate`, as `qarl eval` takes it."""
    pairs = ((f"--{name.replace('_', '-')}", text) for name, text in comparison.evaluate.items())
    return [word for pair in pairs for word in pair]


def commands_left(comparison: Comparison, cell: Cell, processes: int | None = None) -> list[list[str]]:
    """The arguments of `qarl` that are left to run of a cell, in order; none of a finished one.

    Raises `ConfigError` for a folder in the cell's place that holds something else.
    """
    config, folder = comparison.run_config(cell), comparison.folder(cell)
    left = _quantizing(comparison, cell, config) if cell.variant.quantized else _training(config, folder, processes)
    evaluations = []
    if cell.variant.quantized and config.eval.problems:
        evaluations.append([])
    if comparison.evaluate:
        evaluations.append(evaluation_options(comparison))
    for options in evaluations:
        file = evaluation_file(comparison, cell, options)
        if left or not file.is_file():
            left.append(["eval", str(folder), *options, "--json", str(file)])
    return left


def _training(config: RunConfig, path: Path, processes: int | None) -> list[list[str]]:
    together = [] if processes is None else ["--processes", str(processes)]
    folder = existing_run(config)
    if folder is not None and folder.is_held():
        raise ConfigError(f"run {str(path)!r} is written by another process; wait for it to end, or stop it")
    if folder is None or not folder.steps():
        return [["train", "--config", f"{path}.yaml", *together]]
    return [] if is_finished(folder, config) else [["train", "--resume", str(path), *together]]


def _quantizing(comparison: Comparison, cell: Cell, config: RunConfig) -> list[list[str]]:
    quantized, folder = cell.variant.quantized, comparison.folder(cell)
    assert quantized is not None
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(f"{str(folder)!r} is no checkpoint; choose another --output, or remove it")
    note = read_note(folder)
    if "moved" in note:
        if (note["scheme"], note["ptq"]) != (config.scheme, quantized.method):
            raise ConfigError(
                f"{str(folder)!r} was quantized to {note['scheme']} by {note['ptq']}, not to {config.scheme} by "
                f"{quantized.method}; choose another --output, or remove it"
            )
        return []
    calibration = [] if quantized.calibration is None else ["--calibration", str(quantized.calibration)]
    source = comparison.folder(Cell(quantized.of, cell.seed))
    words = ["--ptq", quantized.method, "--scheme", config.scheme, *calibration]
    return [["export", str(source), "-o", str(folder), *words]]


def run_cells(comparison: Comparison, workers: int, processes: int | None, console: Console) -> list[Failed]:
    """Run what is left of all cells, `workers` at a time, a CPU core or a GPU each; those that failed.

    What is quantized waits for all that is trained. Raises `KeyboardInterrupt` once every child has saved a checkpoint
    and ended; the same command goes on from there.
    """
    comparison.output.mkdir(parents=True, exist_ok=True)
    cells = comparison.cells()
    left = [cell for cell in cells if commands_left(comparison, cell, processes)]
    done = len(cells) - len(left)
    console.print(f"{len(cells)} cells, {done} of them finished before, {workers} at a time", highlight=False)
    failed: list[Failed] = []
    with _interruptible():
        for quantized in (False, True):
            children = _Children(comparison, workers, processes, console)
            failed += children.run([cell for cell in left if (cell.variant.quantized is not None) == quantized])
    return failed


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

    def __init__(self, comparison: Comparison, workers: int, processes: int | None, console: Console):
        self._comparison, self._workers, self._processes = comparison, workers, processes
        self._console = console
        self._running: set[subprocess.Popen[bytes]] = set()
        self._places = list(range(workers))
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, cells: list[Cell]) -> list[Failed]:
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._run_cell, cell) for cell in cells]
            try:
                return [failed for future in futures if (failed := future.result()) is not None]
            except KeyboardInterrupt:
                with self._lock:
                    self._stopped = True
                    for child in self._running:
                        child.send_signal(signal.SIGINT)
                pool.shutdown(cancel_futures=True)
                raise

    def _run_cell(self, cell: Cell) -> Failed | None:
        start, log = time.monotonic(), self._comparison.output / f"{cell.name}.log"
        config, folder = self._comparison.run_config(cell), self._comparison.folder(cell)
        commands = commands_left(self._comparison, cell, self._processes)
        with log.open("wb") as output:
            for command in commands:
                if command[:2] == ["train", "--config"]:
                    shutil.rmtree(folder, ignore_errors=True)  # a run that broke off before its first checkpoint
                    tree = located(config).model_dump(mode="json")
                    Path(command[2]).write_text(yaml.safe_dump(tree, sort_keys=False))
                elif command[0] == "export":
                    shutil.rmtree(folder, ignore_errors=True)
                status = self._run_command(command, output)
                if status != 0:
                    break
        if status != 0:
            self._console.print(f"{cell.name}: failed with exit status {status} ({log})", highlight=False)
            words = log.read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:]
            return Failed(cell, "\n".join(words), log)
        self._console.print(f"{cell.name}: done in {time.monotonic() - start:.0f} s", highlight=False)
        return None

    def _run_command(self, command: Sequence[str], output: object) -> int:
        with self._lock:
            if self._stopped:
                return 130
            place = self._places.pop()
            # A session of its own: a terminal's Ctrl-C reaches the children once, through `run`.
            child = subprocess.Popen(
                [sys.executable, "-m", "qarl", *command], env=_environment(place, self._workers),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._running.add(child)
        status = child.wait()
        with self._lock:
            self._running.discard(child)
            self._places.append(place)
        return status


def _environment(place: int, workers: int) -> dict[str, str]:
    """Of one of several workers: its share of the cores and of the GPUs. One alone has all of them."""
    environment = dict(os.environ)
    if workers == 1:
        return environment
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    devices = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d] or _gpus()
    share = max(1, len(devices) // workers)
    if devices:
        first = place * share % len(devices)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first : first + share])
    return environment


def _gpus() -> list[str]:
    import torch

    return [str(device) for device in range(torch.cuda.device_count())]
