"""The commands of `qarl` that are left to run of a cell, and the checks of a comparison before its
first cell runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qarl.compare.comparison import Cell, Comparison, Quantized
from qarl.configs.errors import ConfigError, QarlError
from qarl.configs.schema.base import differing
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import UNQUANTIZED
from qarl.evaluation.suites import suite_tasks
from qarl.preflight.files import check_files, check_new_folder
from qarl.preflight.schemes import check_schemes
from qarl.report.run_folder import RunFolder, with_absolute_paths
from qarl.report.startup import phase
from qarl.run.export_note import is_finished, read_note
from qarl.tasks import Task

_PLANNED = {
    "rollout.kv_cache_gib": None,
    "learner.gradient_checkpointing": "auto",
    "learner.compile": "auto",
}
"""Fields that `qarl.planning` decides if they have this value; `qarl train` records the decision.
"""


def existing_run(config: RunConfig) -> RunFolder | None:
    """Return the run in `config.output`, finished or not, or None if there is none.

    Raises `ConfigError` if the folder has a run of another configuration.
    """
    path = Path(str(config.output))
    if not path.exists():
        return None
    folder = RunFolder.open(path)
    recorded_config = with_absolute_paths(folder.config())
    differences = differing(recorded_config, with_absolute_paths(config))
    for field, (recorded, wanted) in differences.items():
        if field != "output" and wanted != _PLANNED.get(field, recorded):
            raise ConfigError(
                f"run {str(path)!r} has {field} {recorded!r} where {wanted!r} is wanted; choose"
                " another --output, or remove that one"
            )
    return folder


def evaluation_file(comparison: Comparison, cell: Cell, options: Sequence[str] = ()) -> Path:
    """Return the file to which `qarl eval` with these options writes its results of a cell."""
    words = [option.removeprefix("--").replace("/", "_") for option in options]
    return comparison.output / f"{cell.name}.{'-'.join(['eval', *words])}.json"


def evaluation_options(comparison: Comparison) -> list[str]:
    """Return the comparison's `evaluate` as arguments of `qarl eval`."""
    pairs = ((f"--{name.replace('_', '-')}", text) for name, text in comparison.evaluate.items())
    return [word for pair in pairs for word in pair]


def commands_left(
    comparison: Comparison, cell: Cell, processes: int | None = None
) -> list[list[str]]:
    """Return the commands that are left to run of a cell, in order, as arguments of `qarl`.

    A finished cell has none. Raises `ConfigError` if the cell's folder holds something else.
    """
    config = comparison.run_config(cell)
    folder = comparison.folder(cell)
    quantized = cell.variant.quantized
    if quantized:
        left = _quantizing(comparison, cell, config, quantized)
    else:
        left = _training(config, processes)
    evaluations = []
    if quantized and config.eval.problems:
        evaluations.append([])
    if comparison.evaluate:
        evaluations.append(evaluation_options(comparison))
    for options in evaluations:
        file = evaluation_file(comparison, cell, options)
        if left or not file.is_file():
            left.append(["eval", str(folder), *options, "--json", str(file)])
    return left


def _training(config: RunConfig, processes: int | None = None) -> list[list[str]]:
    """Return the training command that is left, if any."""
    path = str(config.output)
    together = [] if processes is None else ["--processes", str(processes)]
    folder = existing_run(config)
    if folder is not None and folder.is_held():
        raise ConfigError(
            f"run {path!r} is written by another process; wait for it to end, or stop it"
        )
    if folder is None or not folder.steps():
        return [["train", "--config", f"{path}.yaml", *together]]
    return [] if is_finished(folder, config) else [["train", "--resume", path, *together]]


def _quantizing(
    comparison: Comparison, cell: Cell, config: RunConfig, quantized: Quantized
) -> list[list[str]]:
    """Return the quantizing command that is left, if any."""
    source = comparison.source(cell)
    folder = comparison.folder(cell)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not a checkpoint; choose another --output, or remove it"
        )
    note = read_note(folder)
    if "moved" in note and not _training(comparison.run_config(source)):
        scheme = note["scheme"]
        method = note["ptq"]
        calibration = note.get("calibration")
        same = (scheme, method) == (config.scheme, quantized.method)
        if not same or quantized.calibration not in (None, calibration):
            raise ConfigError(
                f"{str(folder)!r} was quantized to {scheme} by {method}, not to"
                f" {config.scheme} by {quantized.method} (its calibration: {calibration}); choose"
                " another --output, or remove it"
            )
        return []
    options = ["--ptq", quantized.method, "--scheme", config.scheme]
    if quantized.calibration is not None:
        options += ["--calibration", str(quantized.calibration)]
    return [["export", str(comparison.folder(source)), "-o", str(folder), *options]]


def check(
    comparison: Comparison,
    processes: int | None,
) -> dict[Cell, list[list[str]]]:
    """Check a comparison, and return the commands that are left of each cell (`commands_left`).

    Raises the error of the part that is wrong, with the cell's name. What can be checked without
    torch comes first; what does not depend on the seed is checked once per variant. processes: of
    each run, as in `commands_left`.
    """
    if not comparison.output.is_dir():
        check_new_folder(comparison.output, "folder", "--output")
    left = {}
    for cell in comparison.cells():
        with _named(cell):
            left[cell] = commands_left(comparison, cell, processes)
    tasks: dict[Cell, Task | None] = {}
    for cell in left:
        if cell.seed == comparison.seeds[0]:
            with _named(cell):
                tasks[cell] = _check_files(comparison, cell)
    with phase("importing torch, transformers and compressed-tensors"):
        from qarl.preflight.prepare import check_inputs
        from qarl.ptq.export import check_request
    for cell, task in tasks.items():
        quantized = cell.variant.quantized
        config = comparison.run_config(cell)
        with _named(cell):
            if task is not None:
                check_inputs(config, task, processes or 1, saves=True)
            elif quantized is not None:
                source = comparison.run_config(comparison.source(cell))
                check_request(
                    source,
                    str(source.output),
                    quantized.method,
                    config.scheme,
                    quantized.calibration,
                )
    return left


def _check_files(comparison: Comparison, cell: Cell) -> Task | None:
    """Check what needs no torch: files of the run and copies of the suite.

    Returns the task of a run; None if the cell quantizes another one's masters.
    """
    config = comparison.run_config(cell)
    data = comparison.evaluate.get("data")
    task = None
    if cell.variant.quantized is None:
        check_schemes(config)
        task = check_files(config, new=False)
    elif config.scheme == UNQUANTIZED:
        raise ConfigError(
            f"ptq {cell.variant.quantized.method} to scheme 'bf16'; give a low-bit --scheme"
        )
    if "suite" in comparison.evaluate:
        suite_tasks(comparison.evaluate["suite"], Path(data) if data else None, config.task)
    return task


@contextmanager
def _named(cell: Cell) -> Iterator[None]:
    """Put the cell's name before the message of errors raised in this context."""
    try:
        yield
    except QarlError as error:
        raise type(error)(f"{cell.name}: {error}") from error
