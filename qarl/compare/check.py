"""What of a comparison is refused before its first cell runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.compare.commands import commands_left
from qarl.compare.comparison import Cell, Comparison
from qarl.configs.errors import ConfigError, QarlError
from qarl.configs.schemes import UNQUANTIZED, check_scheme_name
from qarl.evaluation.suites import suite_tasks
from qarl.report.startup import phase
from qarl.run.check import check_files, check_new_folder


def check(comparison: Comparison, processes: int | None) -> dict[Cell, list[list[str]]]:
    """What is left to run of each cell (`commands_left`). Raises the error of the part that is wrong, with the cell's
    name; first what is seen without torch. What does not depend on the seed is checked once a variant.

    processes: of each run, as of `commands_left`.
    """
    if not comparison.output.is_dir():
        check_new_folder(comparison.output, "folder", "--output")
    left = {}
    for cell in comparison.cells():
        with _named(cell):
            left[cell] = commands_left(comparison, cell, processes)
    first = [cell for cell in left if cell.seed == comparison.seeds[0]]
    for cell in first:
        with _named(cell):
            _check_files(comparison, cell)
    with phase("importing torch, transformers and compressed-tensors"):
        from qarl.ptq.export import check_request
        from qarl.run.session import check_input
    for cell in first:
        quantized, config = cell.variant.quantized, comparison.run_config(cell)
        with _named(cell):
            if quantized is None:
                check_input(config, processes or 1)
            else:
                source = comparison.run_config(comparison.source(cell))
                check_request(source, str(source.output), quantized.method, config.scheme, quantized.calibration)
    return left


def _check_files(comparison: Comparison, cell: Cell) -> None:
    config, data = comparison.run_config(cell), comparison.evaluate.get("data")
    check_scheme_name(config.scheme)
    if cell.variant.quantized is None:
        check_files(config, new=False)
    elif config.scheme == UNQUANTIZED:
        raise ConfigError(f"ptq {cell.variant.quantized.method} to scheme 'bf16'; give a low-bit --scheme")
    if "suite" in comparison.evaluate:
        suite_tasks(comparison.evaluate["suite"], Path(data) if data else None, config.task)


@contextmanager
def _named(cell: Cell) -> Iterator[None]:
    """Errors within this context begin with the cell's name."""
    try:
        yield
    except QarlError as error:
        raise type(error)(f"{cell.name}: {error}") from error
