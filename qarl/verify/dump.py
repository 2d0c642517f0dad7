"""Read dumps of log-probs: Parquet or JSONL with a row a completion, or QaRL's token files.

Files are read in batches, so that memory does not grow with the dump. A null log-prob means that
the side has none for that token: the sampler for tokens that it did not sample, the trainer for
tokens that it did not score. NaN and infinities are refused.

Axes: B completions of a batch, T their tokens laid end to end.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qarl.configs.words import did_you_mean, few
from qarl.verify.findings import VerifyInputError
from qarl.verify.framework_rows import FOLDER_PATTERNS, framework_row

REQUIRED = ("completion_ids", "sampler_logprobs", "trainer_logprobs")
"""Columns of lists, one value a token, that a dump must have."""
VERSIONS = ("weight_version", "trainer_version", "age")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SCALARS = (*VERSIONS, *SAMPLING, "reward", "advantage")
"""Optional columns with a number a completion; versions and advantages may be lists instead."""
OPTIONAL = ("prompt_ids", *SCALARS)

_OF_TOKEN_FILES = {
    "token_id": "completion_ids",
    "sampler_logprob": "sampler_logprobs",
    "learner_logprob": "trainer_logprobs",
    "prompt_token_ids": "prompt_ids",
}
"""Columns of QaRL's token files (docs/reference/tokens.md) → columns of a dump."""
_SUFFIXES = (".parquet", ".jsonl")
_ROWS = 256
"""Upper bound on the completions of a batch."""
_BATCH = 2**24
"""Size of a batch's text, or of its columns in Parquet, above which no completion is added, bytes.
As Python's numbers it needs some six times as much memory.
"""
_BUFFER = 2**20
"""Bytes of a Parquet column that are read at once; otherwise a whole row group's are."""
_LARGEST_ID = 2**31 - 1
"""Upper bound on token ids."""
_ABOVE_ZERO = 1e-4
"""Log-probs up to this value are 0 after rounding."""


@dataclass(frozen=True)
class Batch:
    """Some completions of a dump."""

    first: int
    """Number of the first completion, counted over all files from 0."""
    lengths: np.ndarray
    """Tokens of each completion, int [B]."""
    token_ids: np.ndarray
    """Tokens of the completions, int [T]."""
    sampler: np.ndarray
    """The sampler's log-probs, nats [T]; NaN where it has none."""
    trainer: np.ndarray
    """The trainer's log-probs, nats [T]; NaN where it has none."""
    prompts: Sequence[Sequence[int]] | None
    """Token ids of the prompts; None if the dump has none."""
    advantages: np.ndarray | None
    """Advantages, [T]; None if the dump has none."""
    scalars: Mapping[str, np.ndarray]
    """The other columns of `SCALARS` that the dump has, [B] each; NaN where a row has none. A list
    of versions became its smallest, the stalest part of the completion.
    """

    @property
    def rows(self) -> np.ndarray:
        """Return the number of each token's completion in this batch, int [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def dump_files(paths: Sequence[Path | str]) -> list[Path]:
    """Return the files of dumps, each of which is a file, a folder of files or a run of QaRL.

    Raises `VerifyInputError` for a path that does not exist or has no dump.
    """
    files: list[Path] = []
    for named in map(Path, paths):
        path = named / "tokens" if (named / "tokens").is_dir() else named
        if path.is_dir():
            # A framework's folder may hold other files of these suffixes, such as of validations.
            patterns = (sorted(path.glob(pattern)) for pattern in FOLDER_PATTERNS)
            inside = next(filter(None, patterns), [])
            inside = inside or sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
            if not inside:
                raise VerifyInputError(
                    f"folder {str(named)!r} has no dump; give files or a folder of files that end"
                    f" in {' or '.join(_SUFFIXES)}, or a run of `qarl train` with recorded tokens"
                )
            files += inside
        elif not path.exists():
            raise VerifyInputError(f"dump {str(named)!r} does not exist; check the path")
        elif path.suffix not in _SUFFIXES:
            raise VerifyInputError(
                f"dump {str(named)!r} ends in {path.suffix!r}; it must be Parquet or JSON lines,"
                f" with a name that ends in {' or '.join(_SUFFIXES)}"
            )
        else:
            files.append(path)
    if not files:
        raise VerifyInputError("no dump is given; name one file, folder or run at least")
    return files


def read_dumps(paths: Sequence[Path | str], unused: set[str]) -> Iterator[Batch]:
    """Yield the completions of dumps in batches.

    Args:
        paths: as in `dump_files`.
        unused: names of columns that mean nothing here are added to this set.

    Raises:
        VerifyInputError: a file cannot be read, lacks a column, or holds impossible values.
    """
    first = 0
    for file in dump_files(paths):
        rows = _parquet(file, unused) if file.suffix == ".parquet" else _json_lines(file, unused)
        for columns in rows:
            batch = _batch(columns, first, f"{str(file)!r}")
            first += len(batch.lengths)
            yield batch
    if not first:
        raise VerifyInputError(
            f"{few([str(path) for path in paths])}: no completion in it; name a dump with at least"
            " one"
        )


def _parquet(
    file: Path,
    unused: set[str],
) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns of a Parquet file, some rows at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as opened:
            schema = opened.schema_arrow
            renamed = _OF_TOKEN_FILES if b"qarl.tokens" in (schema.metadata or {}) else {}
            names: dict[str, str] = {
                renamed.get(str(name), str(name)): str(name) for name in schema.names
            }
            wanted = _wanted(names, f"{str(file)!r}", unused if not renamed else set())
            columns = [names[name] for name in wanted]
            stored = opened.metadata
            size = sum(stored.row_group(n).total_byte_size for n in range(stored.num_row_groups))
            rows = min(_ROWS, max(1, _BATCH * stored.num_rows // max(1, size)))
            for part in opened.iter_batches(batch_size=rows, columns=columns):
                values = part.to_pydict()
                yield {name: values[names[name]] for name in wanted}
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise VerifyInputError(f"{str(file)!r} cannot be read: {reason}; write it again") from error


def _json_lines(
    file: Path,
    unused: set[str],
) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns of a file of JSON lines, some rows at a time."""
    try:
        with file.open(encoding="utf-8") as lines:
            for chunk in _chunks(lines, file):
                names = {name for row in chunk for name in row}
                wanted = _wanted(dict.fromkeys(sorted(names)), f"{str(file)!r}", unused)
                yield {name: [row.get(name) for row in chunk] for name in wanted}
    except (OSError, UnicodeDecodeError) as error:
        raise VerifyInputError(
            f"{str(file)!r} cannot be read: {error}; write it again, as UTF-8"
        ) from error


def _chunks(lines: Iterable[str], file: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file's lines, as many at a time as `_ROWS` and `_BATCH` allow."""
    chunk: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(lines, 1):
        chunk.append(_object(line, file, number))
        size += len(line)
        if len(chunk) == _ROWS or size >= _BATCH:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def _object(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise VerifyInputError(
            f"{str(file)!r}, line {number} is not JSON: {error}; write an object a line"
        ) from error
    if not isinstance(row, dict):
        raise VerifyInputError(
            f"{str(file)!r}, line {number} is a {type(row).__name__}; write an object a line, with"
            f" {', '.join(REQUIRED)}"
        )
    return framework_row(row, file, f"{str(file)!r}, line {number}")


def _wanted(
    names: Mapping[str, Any],
    where: str,
    unused: set[str],
) -> list[str]:
    """Return the columns that mean something here, and add the others to `unused`.

    Raises `VerifyInputError` if a required one is missing.
    """
    for column in REQUIRED:
        if column not in names:
            near = did_you_mean(column, names)
            raise VerifyInputError(
                f"{where} has no column {column!r} but {', '.join(sorted(names)) or 'none'}{near};"
                f" a dump has {', '.join(REQUIRED)}, and may have {', '.join(OPTIONAL)}"
            )
    unused.update(name for name in names if name not in REQUIRED + OPTIONAL)
    return [name for name in names if name in REQUIRED + OPTIONAL]


def _batch(
    columns: Mapping[str, list[Any]],
    first: int,
    where: str,
) -> Batch:
    """Return the rows of some columns as arrays. Raises `VerifyInputError`."""
    ids = columns["completion_ids"]
    count = len(ids)
    for name in REQUIRED:
        for row, values in enumerate(columns[name]):
            if not isinstance(values, list):
                raise VerifyInputError(
                    f"{where}, row {first + row}: {name} is {_kind(values)}; it must be a list with"
                    " a value a token"
                )
    prompts = columns.get("prompt_ids")
    for row, prompt in enumerate(prompts or []):
        if prompt is not None and not isinstance(prompt, list):
            raise VerifyInputError(
                f"{where}, row {first + row}: prompt_ids is {_kind(prompt)}; it must be a list of"
                " token ids, or null if unknown"
            )
    for row in range(count):
        _check_lengths(columns, prompts, row, f"{where}, row {first + row}")
    lengths = np.array([len(each) for each in ids], dtype=np.int64)
    sampler = _flat(columns["sampler_logprobs"], "sampler_logprobs", first, where)
    trainer = _flat(columns["trainer_logprobs"], "trainer_logprobs", first, where)
    scalars = {}
    advantages = None
    for name in SCALARS:
        if name not in columns:
            continue
        if name == "advantage":
            advantages = _advantages(columns[name], lengths, first, where)
        else:
            scalars[name] = _scalars(columns[name], name, first, where)
    known = prompts and [each or [] for each in prompts]
    if known:
        _token_ids(known, "prompt_ids", first, where)
    return Batch(
        first=first,
        lengths=lengths,
        token_ids=_token_ids(ids, "completion_ids", first, where),
        sampler=sampler,
        trainer=trainer,
        prompts=known,
        advantages=advantages,
        scalars=scalars,
    )


def _check_lengths(
    columns: Mapping[str, list[Any]], prompts: list[Any] | None, row: int, where: str
) -> None:
    """Raise `VerifyInputError` if a row's lists differ in length."""
    tokens = len(columns["completion_ids"][row])
    for name in ("sampler_logprobs", "trainer_logprobs"):
        has = len(columns[name][row])
        if has == tokens:
            continue
        why = f"write one value a token, null for tokens without one; {tokens} are wanted"
        if prompts and prompts[row] and has == tokens + len(prompts[row]):
            why = (
                f"{has} are its {len(prompts[row])} prompt_ids and its completion, so the prompt is"
                f" scored too: cut the first {len(prompts[row])}"
            )
        elif has == tokens - 1:
            why = (
                "a causal model's logits[:, :-1] score tokens 1 and later: prepend the prompt's"
                " last token before scoring, so that the first token has a value"
            )
        raise VerifyInputError(
            f"{where}: {name} has {has} values, and completion_ids {tokens}; {why}"
        )


def _token_ids(ids: list[list[Any]], name: str, first: int, where: str) -> np.ndarray:
    """Return token ids laid end to end. Raises `VerifyInputError` for what is no token's id."""
    flat = [token for row in ids for token in row]
    for row, each in enumerate(ids):
        for token in each:
            if type(token) is not int or not 0 <= token <= _LARGEST_ID:
                raise VerifyInputError(
                    f"{where}, row {first + row}: {name} holds {_kind(token)}; token ids are whole"
                    " numbers from 0 (labels such as -100 are of padding: cut it off)"
                )
    return np.array(flat, dtype=np.int64)


def _flat(
    values: list[list[Any]],
    name: str,
    first: int,
    where: str,
) -> np.ndarray:
    """Return log-probs laid end to end, NaN for null. Raises `VerifyInputError` for NaN, infinities
    and values above 0.
    """
    flat = [value for each in values for value in each]
    if {type(value) for value in flat} <= {float, int, type(None)}:
        array = np.array(flat, dtype=np.float64)  # None becomes NaN
        valid = (array <= _ABOVE_ZERO) & (array > -math.inf)
        if int(valid.sum()) + sum(value is None for value in flat) == len(flat):
            return array
    for row, each in enumerate(values):
        for token, value in enumerate(each):
            if value is not None:
                _check_logprob(value, f"{where}, row {first + row}, token {token}: {name}")
    raise AssertionError("one of the values is refused")


def _check_logprob(value: Any, where: str) -> None:
    """Raise `VerifyInputError` if a value cannot be a log-prob."""
    holds = f"{where} holds {_kind(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise VerifyInputError(f"{holds}; log-probs are numbers, or null if there is none")
    if math.isnan(value):
        raise VerifyInputError(
            f"{holds}; write null for a token that was not scored, and find out which layer made it"
            " if it was"
        )
    if math.isinf(value):
        raise VerifyInputError(
            f"{holds}, a token of probability 0; a side that cuts top_k or top_p before it scores"
            " gives that, so score with all tokens, or write null"
        )
    if value > _ABOVE_ZERO:
        raise VerifyInputError(
            f"{holds}, above 0; log-probs are natural logarithms of probabilities (if these are"
            " probabilities or negated, convert them)"
        )


def _advantages(
    values: list[Any],
    lengths: np.ndarray,
    first: int,
    where: str,
) -> np.ndarray:
    """Return advantages of tokens, [T], from one a completion or one a token."""
    parts = []
    for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if isinstance(value, list) and len(value) != length:
            raise VerifyInputError(
                f"{where}, row {first + row}: advantage has {len(value)} values, and completion_ids"
                f" {length}; write one number, or one a token"
            )
        each = value if isinstance(value, list) else [value]
        numbers = [_number(item, "advantage", first + row, where) for item in each]
        parts.append(np.array(numbers) if isinstance(value, list) else np.repeat(numbers, length))
    return np.concatenate(parts)


def _scalars(
    values: list[Any],
    name: str,
    first: int,
    where: str,
) -> np.ndarray:
    """Return numbers of completions, [B]; NaN for null."""
    flat = []
    for row, value in enumerate(values):
        if isinstance(value, list) and name in VERSIONS:
            present = [
                _number(item, name, first + row, where) for item in value if item is not None
            ]
            stalest = max if name == "age" else min
            value = stalest(present, default=None)
        flat.append(_number(value, name, first + row, where))
    return np.array(flat, dtype=np.float64)


def _number(value: Any, name: str, row: int, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        lists = " or a list of them" if name in (*VERSIONS, "advantage") else ""
        raise VerifyInputError(
            f"{where}, row {row}: {name} is {_kind(value)}; it must be a finite number{lists}, or"
            " null if unknown"
        )
    return float(value)


def _kind(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
