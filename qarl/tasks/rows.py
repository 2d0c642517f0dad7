"""Reads rows of questions: JSON lines, CSV, TSV and Parquet files, and Hugging Face data sets.

A row maps columns to values, and knows where it came from, such as "q.jsonl:3", for messages.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.configs.hub import hub_or_cache
from qarl.configs.words import quoted
from qarl.tasks.base import Split, TaskError

HUB = "hf:"


@dataclass(frozen=True)
class Row:
    """One row of a file or data set."""

    where: str
    """File or data set, and number of the row."""
    values: dict[str, Any]
    """Column → value."""
    split: Split | None = None
    """Split that the row's file or data set determines; None if it does not."""


def is_table(name: str) -> bool:
    """Return whether a task's name is that of a file of questions or of a data set."""
    return name.startswith(HUB) or Path(name).suffix in _READERS


def short_name(name: str) -> str:
    """Return a task's name; for a file, without its folders."""
    return name if name.startswith(HUB) else Path(name).name


def file_rows(path: Path) -> list[Row]:
    """Return all rows of a file.

    Raises `TaskError` if it is missing, or not in the format of its suffix.
    """
    if not path.is_file():
        if path.is_dir():
            raise TaskError(f"task file {path} is a folder; name a file in it")
        hint = (
            f" in {Path.cwd()}, where relative paths begin; change to its folder, or give its whole"
            " path"
        )
        if path.is_absolute():
            hint = "; check its name"
        raise TaskError(f"task file {path} does not exist{hint}")
    try:
        return list(_READERS[path.suffix](path))
    except OSError as error:
        raise TaskError(
            f"task file {path} cannot be read: {error.strerror or error}; make it"
            " readable, or name another"
        ) from error


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            values: Any = json.loads(line)
            # Half of a surrogate pair cannot be encoded.
            json.dumps(values, ensure_ascii=False).encode()
        except ValueError as error:
            raise TaskError(
                f"{where}: not valid JSON: {error}; got {quoted(line)}; write one object a line,"
                ' like {"question": "1 + 1 =", "answer": "2"}'
            ) from error
        if not isinstance(values, dict):
            raise TaskError(f"{where}: expected a JSON object, got {quoted(values)}")
        yield Row(where, values)


def _csv(path: Path) -> Iterator[Row]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    reader = csv.DictReader(io.StringIO(_text(path)), delimiter=delimiter)
    try:
        columns = reader.fieldnames or ()
        if len({*columns}) < len(columns):
            raise TaskError(f"{path}:1: a column appears twice: {', '.join(columns)}; rename one")
        for values in reader:
            where = f"{path}:{reader.line_num}"
            # DictReader puts further fields under the key None, and fills missing ones with None.
            if None in values:
                raise TaskError(
                    f"{where}: more fields than the {len(columns)} columns; quote fields that hold"
                    " commas"
                )
            if None in values.values():
                missing = [column for column, value in values.items() if value is None]
                raise TaskError(
                    f"{where}: {len(columns) - len(missing)} of {len(columns)} fields; missing:"
                    f" {', '.join(missing)}. Add them, or remove the row"
                )
            yield Row(where, dict(values))
    except csv.Error as error:
        raise TaskError(f"{path}:{reader.line_num}: {error}; save the file as CSV anew") from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise TaskError(
            f"task file {path} is not a Parquet file: {str(error).splitlines()[0]}; write"
            " it again, or rename it to the format that it has"
        ) from error
    for number, values in enumerate(table.to_pylist(), start=1):
        yield Row(f"{path}:{number}", values)


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
FILES = tuple(_READERS)
"""Suffixes of files of questions."""


def _text(path: Path) -> str:
    """Return the file's text without the byte order mark that some editors write."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise TaskError(
            f"{path}:{line}: not UTF-8 text (byte {error.object[error.start]:#04x}); save the file"
            " as UTF-8"
        ) from error


def hub_rows(
    name: str,
    subset: str | None,
    split: str,
    heldout: str | None,
) -> list[Row]:
    """Return rows of a Hugging Face data set. Importing `datasets` takes seconds.

    Args:
        name: "hf:owner/name" for one on the Hub or in its cache. "hf:FOLDER" for a local copy, for
            data files, or for a folder that `save_to_disk` wrote.
        subset: Name of a subset, or None.
        split: Split to train on.
        heldout: Split to evaluate on. Default: the questions' hashes decide.

    Raises:
        TaskError: The data set cannot be found or read, or has no such subset or split.
    """
    rows = [
        Row(f"{name}[{split}]:{n}", row, "train" if heldout else None)
        for n, row in _split(name, subset, split)
    ]
    if heldout is not None:
        rows += [
            Row(f"{name}[{heldout}]:{n}", row, "heldout")
            for n, row in _split(name, subset, heldout)
        ]
    return rows


def _split(
    name: str,
    subset: str | None,
    split: str,
) -> Iterator[tuple[int, dict[str, Any]]]:
    import datasets

    source = name.removeprefix(HUB)
    folder = Path(source)
    is_local = folder.is_dir()
    if not is_local and (source.startswith((".", "/", "~")) or source.count("/") != 1):
        raise TaskError(
            f"{name!r}: there is no folder {source!r}; give one, or a data set's id, as in"
            " hf:owner/name"
        )
    datasets.disable_progress_bars()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            dataset: Any = _from_disk(name, folder, split)
        else:
            with nullcontext() if is_local else hub_or_cache():
                path = str(folder) if is_local else source
                dataset = datasets.load_dataset(path, subset, split=split)
    except TaskError:
        raise
    # Errors of the library, of the network, and of the files' formats.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise TaskError(
            f"data set {name!r} cannot be loaded: {reason}; {_remedy(error, source)}"
        ) from error
    return enumerate((dict(row) for row in dataset), start=1)


def _from_disk(name: str, folder: Path, split: str) -> Any:
    import datasets

    dataset = datasets.load_from_disk(str(folder))
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if split not in dataset:
        raise TaskError(
            f"data set {name!r} has no split {split!r}; it has {', '.join(map(str, dataset))}: name"
            " one by --task.split"
        )
    return dataset[split]


def _remedy(error: Exception, source: str) -> str:
    words = str(error).lower()
    if "config name" in words or "builderconfig" in words:
        return "name one by --task.subset"
    if "split" in words:
        return "name another by --task.split or --task.heldout"
    return (
        "check its name and the network (HF_TOKEN for a gated one), or copy it by `hf download"
        f" --repo-type dataset {source} --local-dir DIR` and give hf:DIR (of task math by"
        " --task.data)"
    )
