"""Recorded completions as Parquet files, `runs/NAME/tokens/step-NNNNNN.parquet`.

Each step has a file, and each completion a row. A file is written under another name and renamed,
so that a run that is killed leaves complete files. A resumed run overwrites the files of the steps
it repeats. Any reader of Parquet takes the folder as one table
(`pandas.read_parquet("runs/NAME/tokens")`). docs/guide/report.md lists the columns.

Axes: T tokens, of all completions of a file laid end to end.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from qarl.configs.errors import InputError
from qarl.configs.files import written_aside
from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.rollout.types import Completion, Group, Prompt

FORMAT = "4"
"""Version of the columns; files of another version are refused."""

_FORMAT_KEY = b"qarl.tokens"
_COUNT_KEY = b"qarl.completions"

COMPLETION_COLUMNS = {
    "step": "int32",
    "group": "int32",
    "sample": "int32",
    "prompt_id": "string",
    "prompt": "string",
    "prompt_token_ids": "int32 list",
    "completion": "string",
    "finish_reason": "string",
    "age": "int32",
    "reward": "float64",
    "group_rewards": "float64 list",
    "worst_token": "int32",
    "experts": "binary",
}
"""Columns with one value a completion: name → type."""

PICTURES = "pictures"
"""Column with the prompt's pictures, small PNG files ("binary list"); missing if all prompts
are text.
"""

TOKEN_COLUMNS = {
    "token_id": "int32",
    "token": "string",
    "weight_version": "int32",
    "sampler_logprob": "float32",
    "learner_logprob": "float32",
    "unquantized_logprob": "float32",
    "mismatch": "float32",
    "log_ratio": "float32",
    "clip": "words",
    "advantage": "float32",
    "improbable": "bool",
    "repeated": "bool",
}
"""Columns with one value a token, which are lists in the file: name → type."""


class TokenFileError(InputError, heading="tokens"):
    """Raised for a file of tokens that cannot be read."""


@dataclass(frozen=True)
class TokenRows:
    """The completions of one file."""

    completions: Mapping[str, Sequence[Any]]
    """Columns by the names of `COMPLETION_COLUMNS`, one value a completion.

    "pictures" has tuples of PNG files; it is missing if no prompt of the step had a picture.
    """

    tokens: Mapping[str, np.ndarray]
    """Columns by the names of `TOKEN_COLUMNS`, [T] each.

    "clip" has indices into `CLIP_REASONS`, -1 if unknown. Unknown values of other columns are NaN.
    """

    lengths: Sequence[int]
    """Number of tokens of each completion."""

    def __len__(self) -> int:
        return len(self.lengths)

    def first(self, count: int) -> "TokenRows":
        """Return the first `count` completions."""
        end = sum(self.lengths[:count])
        return TokenRows(
            completions={name: values[:count] for name, values in self.completions.items()},
            tokens={name: values[:end] for name, values in self.tokens.items()},
            lengths=self.lengths[:count],
        )


@cache
def _schema(pictures: bool) -> Any:
    """Return the files' schema, without metadata.

    pictures: whether there is a column of the prompts' pictures.
    """
    # Importing pyarrow starts threads, so that it is imported only where it is needed.
    import pyarrow as pa

    def arrow_type(name: str) -> Any:
        if name == "words":
            return pa.dictionary(pa.int8(), pa.string())
        if name.endswith(" list"):
            return pa.list_(arrow_type(name.removesuffix(" list")))
        return pa.type_for_alias(name)

    columns = [(name, arrow_type(kind)) for name, kind in COMPLETION_COLUMNS.items()]
    columns += [(PICTURES, pa.list_(pa.binary()))] if pictures else []
    columns += [(name, pa.list_(arrow_type(kind))) for name, kind in TOKEN_COLUMNS.items()]
    return pa.schema(columns)


def write_step(folder: Path, step: int, rows: TokenRows, completions: int) -> Path:
    """Write the file of one step, and return its path.

    completions: number of completions that the step had, recorded or not.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = PICTURES in rows.completions
    schema = _schema(pictures).with_metadata({_FORMAT_KEY: FORMAT, _COUNT_KEY: str(completions)})
    edges = np.concatenate([[0], np.cumsum(rows.lengths)])  # of completions, in token columns
    offsets = pa.array(edges, pa.int32())
    columns = [
        pa.array(rows.completions[name], schema.field(name).type)
        for name in _completion_names(pictures)
    ]
    for name in TOKEN_COLUMNS:
        values = rows.tokens[name]
        kind = schema.field(name).type.value_type
        if name == "clip":
            codes = pa.array(values.astype(np.int8), mask=values < 0)
            flat = pa.DictionaryArray.from_arrays(codes, pa.array(CLIP_REASONS))
        else:
            flat = pa.array(values, kind, from_pandas=True)  # NaN is null
        columns.append(pa.ListArray.from_arrays(offsets, flat))
    folder.mkdir(exist_ok=True)
    target = step_file(folder, step)
    with written_aside(target) as building:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), building, compression="zstd")
    return target


def _completion_names(pictures: bool) -> tuple[str, ...]:
    """Return the names of the columns with one value a completion, in their order."""
    return (*COMPLETION_COLUMNS, PICTURES) if pictures else tuple(COMPLETION_COLUMNS)


def step_file(folder: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return folder / f"step-{step:06d}.parquet"


def step_files(folder: Path) -> dict[int, Path]:
    """Return step → file of all files, in the steps' order."""
    files = {}
    for file in folder.glob("step-*.parquet"):
        match = re.fullmatch(r"step-(\d+)\.parquet", file.name)
        if match:
            files[int(match[1])] = file
    return dict(sorted(files.items()))


def drop_after(folder: Path, step: int) -> None:
    """Remove the files of steps after `step`, and the incomplete files of a killed run."""
    for later, file in step_files(folder).items():
        if later > step:
            file.unlink()
    for file in folder.glob("step-*.parquet.part"):
        file.unlink()


def counts(file: Path) -> tuple[int, int]:
    """Return the number of completions that a file has, and the number that its step had.

    Only the end of the file is read. Raises the errors of `read_step`.
    """
    import pyarrow.parquet as pq

    with _readable(file):
        metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    _check_format(file, schema)
    return metadata.num_rows, int(schema.metadata[_COUNT_KEY])


def read_step(file: Path) -> TokenRows:
    """Read one file. Raises `TokenFileError` if it is damaged or has other columns."""
    import pyarrow.parquet as pq

    with _readable(file):
        table = pq.read_table(file)
    _check_format(file, table.schema)
    return TokenRows(
        completions={
            name: table[name].to_pylist()
            for name in _completion_names(PICTURES in table.column_names)
        },
        tokens={name: _flat(table[name].combine_chunks(), name) for name in TOKEN_COLUMNS},
        lengths=[len(ids) for ids in table["token_id"]],
    )


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise `TokenFileError` if reading the file fails within this context."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise TokenFileError(
            f"{str(file)!r} is damaged ({str(error).splitlines()[0]}); remove it to go on without"
            " that step"
        ) from error


def _check_format(file: Path, schema: Any) -> None:
    """Raise `TokenFileError` for the schema of another version."""
    written = (schema.metadata or {}).get(_FORMAT_KEY, b"none").decode(errors="replace")
    if written != FORMAT:
        raise TokenFileError(
            f"{str(file)!r} has format {written}, and this version of qarl reads {FORMAT}; read it"
            " with the version that wrote it (environment.json in its run's folder), or remove it"
        )
    if not schema.equals(_schema(PICTURES in schema.names)):
        raise TokenFileError(
            f"{str(file)!r} has other columns than format {FORMAT}; remove it to go on without that"
            " step"
        )


def _flat(column: Any, name: str) -> np.ndarray:
    """Return a token column, [T], as `TokenRows` has it."""
    values = column.flatten()
    if name != "clip":
        return values.to_numpy(zero_copy_only=False)
    # The file may number the reasons otherwise than `CLIP_REASONS`. A column without any reason
    # needs one entry to index.
    reasons = values.dictionary.to_pylist()
    numbers = np.array([CLIP_REASONS.index(reason) for reason in reasons] or [0])
    codes = values.indices.fill_null(-1).to_numpy()
    return np.where(codes < 0, -1, numbers[codes])


def read_groups(file: Path) -> list[Group]:
    """Return all groups of a file that has all completions of its step.

    Raises `TokenFileError` if the file is damaged.
    """
    rows = read_step(file)
    numbered = zip(rows.completions["group"], range(len(rows)), _completions(rows), strict=True)
    return [
        _group(rows, list(members))
        for _, members in groupby(numbered, key=lambda member: member[0])
    ]


def array_bytes(array: np.ndarray) -> bytes:
    """Return an array as the bytes of a .npy file, which has dtype and shape."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _completions(rows: TokenRows) -> Iterator[Completion]:
    """Yield the completions as the engine returned them."""
    ends = np.cumsum(rows.lengths)[:-1]
    tokens = np.split(rows.tokens["token_id"], ends)
    logprobs = np.split(rows.tokens["sampler_logprob"], ends)
    versions = np.split(rows.tokens["weight_version"], ends)
    columns = rows.completions
    for row in range(len(rows)):
        # Tokens that an environment wrote have no log-prob. Spans of them lie between two edges.
        environment = np.isnan(logprobs[row])
        edges = np.flatnonzero(np.diff(environment, prepend=False, append=False)).tolist()
        experts = columns["experts"][row]
        switched = (np.diff(versions[row]).nonzero()[0] + 1).tolist()
        yield Completion(
            token_ids=tuple(tokens[row].tolist()),
            logprobs=tuple(np.nan_to_num(logprobs[row]).tolist()),
            text=columns["completion"][row],
            weight_version=int(versions[row][0]),
            finish_reason=columns["finish_reason"][row],
            experts=None if experts is None else np.load(io.BytesIO(experts), allow_pickle=False),
            environment=tuple(zip(edges[::2], edges[1::2], strict=True)),
            switches=tuple((token, int(versions[row][token])) for token in switched),
        )


def _group(rows: TokenRows, members: list[tuple[Any, int, Completion]]) -> Group:
    """Return the group of members, given as (group's number, row, completion)."""
    columns = rows.completions
    _, first, _ = members[0]
    return Group(
        prompt=Prompt(
            columns["prompt_id"][first],
            columns["prompt"][first],
            tuple(columns["prompt_token_ids"][first]),
        ),
        completions=tuple(completion for _, _, completion in members),
        rewards=tuple(columns["reward"][row] for _, row, _ in members),
    )
