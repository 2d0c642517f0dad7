"""The groups of a step from its file of tokens, as the learner was given them (`--record all`)."""

import io
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from qarl.report.token_files import TokenRows, read_step
from qarl.rollout.types import Completion, Group, Prompt


def read_groups(file: Path) -> list[Group]:
    """All groups of a file that holds all of its step's completions. Raises `TokenFileError` for a damaged one."""
    rows = read_step(file)
    numbered = zip(rows.completions["group"], range(len(rows)), _completions(rows), strict=True)
    return [_group(rows, list(members)) for _, members in groupby(numbered, key=lambda member: member[0])]


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
            switches=tuple((at, int(versions[row][at])) for at in (np.diff(versions[row]).nonzero()[0] + 1).tolist()),
        )


def _group(rows: TokenRows, members: list[tuple[Any, int, Completion]]) -> Group:
    about, (_, first, _) = rows.completions, members[0]
    return Group(
        prompt=Prompt(about["prompt_id"][first], about["prompt"][first], tuple(about["prompt_token_ids"][first])),
        completions=tuple(completion for _, _, completion in members),
        rewards=tuple(about["reward"][row] for _, row, _ in members),
    )
