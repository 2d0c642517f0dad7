"""Suites of benchmarks by name, from the Hugging Face Hub or from local copies in the same formats.

Loading them from the Hub has not been tried yet: ids, splits and columns are those that public
evaluations use.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from qarl.configs.errors import ConfigError
from qarl.configs.schema.task import TaskConfig
from qarl.configs.words import did_you_mean
from qarl.tasks import Task, TaskError
from qarl.tasks.math import INSTRUCTION, math_checker, math_scorer
from qarl.tasks.rows import FILES, HUB, Row, file_rows, hub_rows
from qarl.tasks.table import Columns, make_table


@dataclass(frozen=True)
class Benchmark:
    """A data set of questions with answers; all of its split is asked."""

    name: str
    """Name in results and of local copies."""
    dataset: str
    """Id on the Hub."""
    split: str
    columns: Columns
    """Columns of question and answer."""


SUITES: dict[str, tuple[Benchmark, ...]] = {
    "math": (
        Benchmark("aime24", "HuggingFaceH4/aime_2024", "train", Columns("problem", "answer")),
        Benchmark("aime25", "math-ai/aime25", "test", Columns("problem", "answer")),
        Benchmark("amc23", "math-ai/amc23", "test", Columns("question", "answer")),
        Benchmark("math500", "HuggingFaceH4/MATH-500", "test", Columns("problem", "answer")),
        Benchmark("minerva", "math-ai/minervamath", "test", Columns("question", "answer")),
        Benchmark(
            "olympiadbench",
            "math-ai/olympiadbench",
            "test",
            Columns("question", "final_answer.0"),
        ),
    )
}
"""Suites by name. "math" has the in-distribution benchmarks of the paper's table 1. The first of
OlympiadBench's list of answers is the reference.
"""


def suite_tasks(name: str, folder: Path | None, config: TaskConfig) -> dict[str, Task]:
    """Return the tasks of a suite by benchmark, judged by math-verify, in the suite's order.

    Args:
        name: Name of the suite.
        folder: Folder with a local copy of each benchmark: NAME.jsonl (.csv, .tsv, .parquet), or a
            folder NAME that `hf download` or `save_to_disk` wrote. None reads the Hub or its cache.
        config: Task whose system prompt and template apply. Default system prompt: that of
            `--task math`.

    Raises:
        ConfigError: The suite is unknown.
        TaskError: Copies cannot be read or are missing; the message names all that are missing,
            and how to get them.
    """
    if name not in SUITES:
        raise ConfigError(
            f"suite {name!r} must be one of {', '.join(SUITES)}{did_you_mean(name, SUITES)}"
        )
    suite = SUITES[name]
    copies = {
        benchmark.name: None if folder is None else _copy(folder, benchmark.name)
        for benchmark in suite
    }
    if folder is not None:
        missing = [benchmark for benchmark in suite if copies[benchmark.name] is None]
        if missing:
            raise TaskError(_missing(name, folder, missing))
    return {benchmark.name: _task(benchmark, copies[benchmark.name], config) for benchmark in suite}


def _copy(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, *(folder / f"{name}{ending}" for ending in FILES))
    return next((path for path in candidates if path.exists()), None)


def _missing(suite: str, folder: Path, missing: list[Benchmark]) -> str:
    commands = "".join(
        f"\n  hf download --repo-type dataset {benchmark.dataset} --local-dir"
        f" {folder / benchmark.name}"
        for benchmark in missing
    )
    names = ", ".join(benchmark.name for benchmark in missing)
    kinds = ", ".join(FILES)
    return (
        f"suite {suite!r}: {str(folder)!r} lacks {names} (a folder of that "
        f"name, or a file of it: {kinds}); on a machine with a network, get them by{commands}"
    )


def _task(benchmark: Benchmark, copy: Path | None, config: TaskConfig) -> Task:
    table = make_table(benchmark.name, _rows(benchmark, copy), benchmark.columns)
    if config.system is None:
        table = table.with_system_prompt(INSTRUCTION)
    return Task(
        source=table,
        reward=math_scorer(),
        checker=math_checker(),
        system=config.system,
        template=config.template,
    )


def _rows(benchmark: Benchmark, copy: Path | None) -> list[Row]:
    """Return a benchmark's rows, all as held-out ones, whatever a file says of its rows."""
    if copy is not None and copy.is_file():
        rows = file_rows(copy)
    else:
        dataset = benchmark.dataset if copy is None else copy
        rows = hub_rows(f"{HUB}{dataset}", None, benchmark.split, None)
    return [dataclasses.replace(row, split="heldout") for row in rows]
