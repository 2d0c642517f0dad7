"""Completions token by token, as Parquet: `runs/NAME/tokens/step-NNNNNN.parquet`, a file a step, a
row a completion.

A file is written under another name and renamed, so a run that is killed leaves whole files, and
one that is resumed writes a step's file over the one before. Any reader of Parquet takes the folder
as one table (`pandas.read_parquet("runs/NAME/tokens")`); docs/guide/report.md lists the columns.

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
"""Of the columns; files of another are refused."""

_FORMAT_KEY, _COUNT_KEY = b"qarl.tokens", b"qarl.completions"

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
"""Lists in the file, each with one value a token."""


class TokenFileError(InputError, heading="tokens"):
    """A file of tokens that cannot be read."""


@dataclass(frozen=True)
class TokenRows:
    """A file's completions. completions: by the names of `COMPLETION_COLUMNS`, a value a
    completion. tokens: by those of `TOKEN_COLUMNS`, [T]; what is not known is NaN, of clip, the
    place in `CLIP_REASONS`, -1. lengths: tokens of each completion.
    """

    completions: Mapping[str, Sequence[Any]]
    tokens: Mapping[str, np.ndarray]
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def first(self, count: int) -> "TokenRows":
        """Its first `count` completions."""
        end = sum(self.lengths[:count])
        return TokenRows(
            completions={name: values[:count] for name, values in self.completions.items()},
            tokens={name: values[:end] for name, values in self.tokens.items()},
            lengths=self.lengths[:count],
        )


@cache
def _schema() -> Any:
    # starts threads when it is imported: no sooner than it is needed
    import pyarrow as pa

    def kind(name: str) -> Any:
        if name == "words":
            return pa.dictionary(pa.int8(), pa.string())
        return (
            pa.list_(kind(name.removesuffix(" list")))
            if name.endswith(" list")
            else pa.type_for_alias(name)
        )

    columns = [(name, kind(of)) for name, of in COMPLETION_COLUMNS.items()]
    columns += [(name, pa.list_(kind(of))) for name, of in TOKEN_COLUMNS.items()]
    return pa.schema(columns)


def write_step(folder: Path, step: int, rows: TokenRows, completions: int) -> Path:
    """One step's file. completions: how many the step had, recorded or not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema().with_metadata({_FORMAT_KEY: FORMAT, _COUNT_KEY: str(completions)})
    offsets = pa.array(np.concatenate([[0], np.cumsum(rows.lengths)]), pa.int32())
    columns = [
        pa.array(rows.completions[name], schema.field(name).type) for name in COMPLETION_COLUMNS
    ]
    for name in TOKEN_COLUMNS:
        values, kind = rows.tokens[name], schema.field(name).type.value_type
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


def step_file(folder: Path, step: int) -> Path:
    """Where that step's completions are."""
    return folder / f"step-{step:06d}.parquet"


def step_files(folder: Path) -> dict[int, Path]:
    """Step → its file, in the steps' order."""
    named = (
        (re.fullmatch(r"step-(\d+)\.parquet", file.name), file)
        for file in folder.glob("step-*.parquet")
    )
    return dict(sorted((int(match[1]), file) for match, file in named if match))


def drop_after(folder: Path, step: int) -> None:
    """Remove the files of later steps, and what a killed run left half written."""
    for later, file in step_files(folder).items():
        if later > step:
            file.unlink()
    for file in folder.glob("step-*.parquet.part"):
        file.unlink()


def counts(file: Path) -> tuple[int, int]:
    """Completions it holds, and how many its step had. Raises as `read_step`, of which it reads the
    end alone.
    """
    import pyarrow.parquet as pq

    with _readable(file):
        metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    _check_format(file, schema)
    return metadata.num_rows, int(schema.metadata[_COUNT_KEY])


def read_step(file: Path) -> TokenRows:
    """Raises `TokenFileError` for a file that is damaged or has other columns."""
    import pyarrow.parquet as pq

    with _readable(file):
        table = pq.read_table(file)
    _check_format(file, table.schema)
    return TokenRows(
        completions={name: table[name].to_pylist() for name in COMPLETION_COLUMNS},
        tokens={name: _flat(table[name].combine_chunks(), name) for name in TOKEN_COLUMNS},
        lengths=[len(ids) for ids in table["token_id"]],
    )


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise TokenFileError(
            f"{str(file)!r} is damaged ({str(error).splitlines()[0]}); remove it to go on without"
            " that step"
        ) from error


def _check_format(file: Path, schema: Any) -> None:
    written = (schema.metadata or {}).get(_FORMAT_KEY, b"none").decode(errors="replace")
    if written != FORMAT:
        raise TokenFileError(
            f"{str(file)!r} has format {written}, and this version of qarl reads {FORMAT}; read it"
            " with the version that wrote it (environment.json in its run's folder), or remove it"
        )
    if not schema.equals(_schema()):
        raise TokenFileError(
            f"{str(file)!r} has other columns than format {FORMAT}; remove it to go on without that"
            " step"
        )


def _flat(column: Any, name: str) -> np.ndarray:
    """A token column, [T], as `TokenRows` has it."""
    values = column.flatten()
    if name != "clip":
        return values.to_numpy(zero_copy_only=False)
    places = np.array(
        [CLIP_REASONS.index(reason) for reason in values.dictionary.to_pylist()] or [0]
    )
    codes = values.indices.fill_null(-1).to_numpy()
    return np.where(codes < 0, -1, places[codes])


def read_groups(file: Path) -> list[Group]:
    """All groups of a file that holds all of its step's completions. Raises `TokenFileError` for a
    damaged one.
    """
    rows = read_step(file)
    numbered = zip(rows.completions["group"], range(len(rows)), _completions(rows), strict=True)
    return [
        _group(rows, list(members))
        for _, members in groupby(numbered, key=lambda member: member[0])
    ]


def array_bytes(array: np.ndarray) -> bytes:
    """Of a file in numpy's own format, which names dtype and shape."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _completions(rows: TokenRows) -> Iterator[Completion]:
    ends = np.cumsum(rows.lengths)[:-1]
    names = ("token_id", "sampler_logprob", "weight_version")
    tokens, logprobs, versions = (np.split(rows.tokens[name], ends) for name in names)
    about = rows.completions
    for row in range(len(rows)):
        environment = np.isnan(logprobs[row])  # none was sampled
        edges = np.flatnonzero(np.diff(environment, prepend=False, append=False)).tolist()
        experts = about["experts"][row]
        yield Completion(
            token_ids=tuple(tokens[row].tolist()),
            logprobs=tuple(np.nan_to_num(logprobs[row]).tolist()),
            text=about["completion"][row],
            weight_version=int(versions[row][0]),
            finish_reason=about["finish_reason"][row],
            experts=None if experts is None else np.load(io.BytesIO(experts), allow_pickle=False),
            environment=tuple(zip(edges[::2], edges[1::2], strict=True)),
            switches=tuple(
                (at, int(versions[row][at]))
                for at in (np.diff(versions[row]).nonzero()[0] + 1).tolist()
            ),
        )


def _group(rows: TokenRows, members: list[tuple[Any, int, Completion]]) -> Group:
    about, (_, first, _) = rows.completions, members[0]
    return Group(
        prompt=Prompt(
            about["prompt_id"][first],
            about["prompt"][first],
            tuple(about["prompt_token_ids"][first]),
        ),
        completions=tuple(completion for _, _, completion in members),
        rewards=tuple(about["reward"][row] for _, row, _ in members),
    )
