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
    """name: in results and local copies. dataset: its Hub id. split: all is asked. columns: of
    question and answer.
    """

    name: str
    dataset: str
    split: str
    columns: Columns


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
"""The paper's table 1, in distribution. Of OlympiadBench's list of answers the first is the
reference.
"""


def suite_tasks(name: str, folder: Path | None, config: TaskConfig) -> dict[str, Task]:
    """Benchmark → its task, judged by math-verify, in the suite's order.

    folder: with a local copy of each: NAME.jsonl (.csv, .tsv, .parquet), or a folder NAME that `hf
    download` or `save_to_disk` wrote; None reads the Hub, or its cache. config: gives system prompt
    and template; without a system prompt the suite has `--task math`'s.

    Raises:
        ConfigError: an unknown suite. TaskError: copies that are missing, all of them named with
        how to get them, or that cannot be read.
    """
    if name not in SUITES:
        raise ConfigError(
            f"suite {name!r} must be one of {', '.join(SUITES)}{did_you_mean(name, SUITES)}"
        )
    suite = SUITES[name]
    places = {
        benchmark.name: None if folder is None else _copy(folder, benchmark.name)
        for benchmark in suite
    }
    if folder is not None:
        missing = [benchmark for benchmark in suite if places[benchmark.name] is None]
        if missing:
            raise TaskError(_missing(name, folder, missing))
    return {benchmark.name: _task(benchmark, places[benchmark.name], config) for benchmark in suite}


def _copy(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, *(folder / f"{name}{ending}" for ending in FILES))
    return next((path for path in candidates if path.exists()), None)


def _missing(suite: str, folder: Path, missing: list[Benchmark]) -> str:
    commands = "".join(
        f"\n  hf download --repo-type dataset {benchmark.dataset} --local-dir"
        f" {folder / benchmark.name}"
        for benchmark in missing
    )
    names, kinds = ", ".join(benchmark.name for benchmark in missing), ", ".join(FILES)
    return (
        f"suite {suite!r}: {str(folder)!r} lacks {names} (a folder of that "
        f"name, or a file of it: {kinds}); on a machine with a network, get them by{commands}"
    )


def _task(benchmark: Benchmark, place: Path | None, config: TaskConfig) -> Task:
    table = make_table(benchmark.name, _rows(benchmark, place), benchmark.columns)
    if config.system is None:
        table = table.behind(INSTRUCTION)
    return Task(
        source=table,
        reward=math_scorer(),
        checker=math_checker(),
        system=config.system,
        template=config.template,
    )


def _rows(benchmark: Benchmark, place: Path | None) -> list[Row]:
    """All of them held out, whatever a file says of its rows."""
    if place is not None and place.is_file():
        rows = file_rows(place)
    else:
        rows = hub_rows(
            f"{HUB}{benchmark.dataset if place is None else place}",
            None,
            benchmark.split,
            None,
        )
    return [dataclasses.replace(row, split="heldout") for row in rows]
