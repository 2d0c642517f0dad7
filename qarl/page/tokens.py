"""The recorded completions of a page, and a table of what the objective did with error tokens.

The page has as many completions as its size allows. Columns of tokens are packed to eleven bytes a
token.

Axes: n tokens of all completions laid end to end.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.page.figures import digits
from qarl.report.token_files import PICTURES, TokenRows

BUDGET = 1_600_000
"""Bytes of the page that completions may use: 100,000 tokens, fewer if completions are short."""

_A_TOKEN = 15
"""Estimate of a token's bytes on the page, without its text."""

_A_COMPLETION = 50
"""Estimate of a completion's bytes on the page, without its tokens and prompt."""

_SHOWN = ("step", "group", "sample", "age")
"""Columns of completions that the page shows unchanged."""

_HALVES = ("sampler_logprob", "mismatch", "log_ratio", "unquantized_logprob")
"""Columns of tokens that the page has as float16."""

_UNKNOWN = 15
"""Number of an unknown clip reason; the known ones are indices into `CLIP_REASONS`."""

_SIGNS = {"A > 0": 1.0, "A < 0": -1.0}
"""Sign of the advantage, in words and as a number."""

_KINDS = ("sound", "improbable", "in a loop")
"""Kinds of tokens; a token in a loop may be improbable too."""

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Position in the response, sampler's log-prob and mismatch of tokens, [n] each."""


def mismatch_columns(steps: Sequence[TokenRows]) -> Columns | None:
    """Return the columns of all tokens whose mismatch is known, or None if there are none."""
    if not steps:
        return None
    position = np.concatenate([np.arange(length) for rows in steps for length in rows.lengths])
    logprob = _column(steps, "sampler_logprob")
    mismatch = _column(steps, "mismatch")
    known = np.isfinite(mismatch)
    return (position[known], logprob[known], mismatch[known]) if known.any() else None


def treatment(kinds: Sequence[Sequence[TokenRows]]) -> list[list[Any]]:
    """Return what the objective did with error tokens, as QaRL's table 6 (arXiv 2604.07853).

    There is a row for each configuration, sign of the advantage and kind of token, if the learner
    learned from any. Its columns are the configuration's number, the sign, the kind, the number of
    tokens, and three fractions of them: clipped, with a mismatch weight that was cut, and
    unchanged.

    kinds: the rows of each configuration's steps.
    """
    none = CLIP_REASONS.index("none")
    corrected = CLIP_REASONS.index("corrected")
    table: list[list[Any]] = []
    for number, steps in enumerate(kinds):
        if not steps:
            continue
        signs = np.sign(_column(steps, "advantage"))
        clip = _column(steps, "clip")
        improbable = np.where(_column(steps, "improbable"), 1, 0)
        token_kinds = np.where(_column(steps, "repeated"), 2, improbable)
        for sign, factor in _SIGNS.items():
            for kind, name in enumerate(_KINDS):
                reasons = clip[(signs == factor) & (token_kinds == kind) & (clip >= 0)]
                if not len(reasons):
                    continue
                clipped = (reasons != none) & (reasons != corrected)
                masks = (clipped, reasons == corrected, reasons == none)
                fractions = [digits(float(mask.mean())) for mask in masks]
                table.append([number, sign, name, len(reasons), *fractions])
    return table


def packed_tokens(runs: Sequence[Sequence[TokenRows]]) -> dict[str, Any]:
    """Return the completions that the page shows, chosen evenly from the steps of each run.

    "completions" has columns with one value a completion. Columns of tokens are packed into
    strings. "recorded" and "shown" are numbers of completions.
    """
    recorded = sum(len(rows) for steps in runs for rows in steps)
    budget = BUDGET
    # Costs are estimates: lower the budget until the actual size fits.
    while True:
        chosen = [
            (number, rows)
            for number, steps in enumerate(runs)
            for rows in _within(steps, budget // len(runs))
        ]
        shown = sum(len(rows) for _, rows in chosen)
        packed = {**_packed(chosen), "recorded": recorded, "shown": shown}
        size = len(json.dumps(packed, ensure_ascii=False).encode(errors="replace"))
        if size <= BUDGET or shown <= len(runs):
            return packed
        budget = int(0.9 * budget * BUDGET / size)


def _within(steps: Sequence[TokenRows], budget: int) -> list[TokenRows]:
    """Return the steps of one run to show.

    They are the last step, and one of every n steps before it, with the smallest n that fits. Steps
    whose completions the unquantized policy scored are preferred. If the last step alone does not
    fit, a part of it is returned.

    budget: bytes that the steps may use.
    """
    costs = [_cost(rows) for rows in steps]
    scored = [bool(np.isfinite(rows.tokens["unquantized_logprob"]).any()) for rows in steps]
    last = len(steps) - 1
    for every in range(1, len(steps) + 1):
        spans = [range(max(0, end - every), end) for end in range(last, 0, -every)]
        picked = [max(span, key=lambda number: (scored[number], number)) for span in spans]
        numbers = [*reversed(picked), last]
        if sum(costs[number] for number in numbers) <= budget:
            return [steps[number] for number in numbers]
    if not steps:
        return []
    sizes = np.cumsum([_A_COMPLETION + _A_TOKEN * length for length in steps[-1].lengths])
    return [steps[-1].first(max(1, int((sizes <= budget).sum())))]


def _cost(rows: TokenRows) -> int:
    """Estimate the bytes of a step's completions on the page."""
    prompts = sum(len(prompt.encode()) for prompt in set(rows.completions["prompt"]))
    files = {file for row in _pictures(rows) for file in row}
    pictures = sum(len(file) * 4 // 3 for file in files)  # in base64
    return _A_TOKEN * sum(rows.lengths) + _A_COMPLETION * len(rows) + prompts + pictures


def _pictures(rows: TokenRows) -> list[list[bytes]]:
    """Return the pictures of each completion's prompt, as small PNG files."""
    columns = rows.completions
    return [list(files) for files in columns[PICTURES]] if PICTURES in columns else [[]] * len(rows)


def _packed(steps: Sequence[tuple[int, TokenRows]]) -> dict[str, Any]:
    """Return the columns of some steps, given with their run's number, as tokens.js reads them.

    Prompts, pictures and tokens' texts are listed once, and columns have their numbers.
    """
    prompts: dict[str, int] = {}
    pictures: dict[bytes, int] = {}
    texts: dict[tuple[int, str], int] = {}
    words: list[int] = []
    names = (
        "run",
        *_SHOWN,
        "prompt",
        "pictures",
        "reward",
        "length",
        "version",
        "last_version",
        "worst",
        "truncated",
        "group_size",
        "group_reward",
        "advantage",
    )
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for number, rows in steps:
        completions = rows.completions
        ends = np.cumsum(rows.lengths)
        pairs = zip(rows.tokens["token_id"].tolist(), rows.tokens["token"], strict=True)
        words += (texts.setdefault(pair, len(texts)) for pair in pairs)
        groups = completions["group_rewards"]
        finish_reasons = completions["finish_reason"]
        for name in _SHOWN:
            columns[name] += completions[name]
        columns["run"] += [number] * len(rows)
        columns["prompt"] += [
            prompts.setdefault(prompt, len(prompts)) for prompt in completions["prompt"]
        ]
        columns["pictures"] += [
            [pictures.setdefault(file, len(pictures)) for file in files]
            for files in _pictures(rows)
        ]
        columns["reward"] += map(digits, completions["reward"])
        columns["length"] += rows.lengths
        for name, versions in _versions(rows).items():
            columns[name] += versions
        columns["worst"] += [-1 if token is None else token for token in completions["worst_token"]]
        columns["truncated"] += [
            int(reason in ("length", "repetition")) for reason in finish_reasons
        ]
        columns["group_size"] += map(len, groups)
        columns["group_reward"] += [digits(sum(group) / len(group)) for group in groups]
        advantages = np.split(rows.tokens["advantage"], ends[:-1])
        columns["advantage"] += map(_advantage, advantages)
    return {
        "prompts": list(prompts),
        "pictures": [base64.b64encode(file).decode() for file in pictures],
        "texts": [text for _, text in texts],
        "ids": [token for token, _ in texts],
        "reasons": list(CLIP_REASONS),
        "completions": columns,
        "wide": len(texts) > 2**16,
        "words": _encoded(np.asarray(words, dtype="<u2" if len(texts) <= 2**16 else "<u4")),
        **{name: _encoded(_halves(steps, name)) for name in _HALVES},
        "flags": _encoded(_flags(steps)),
    }


def _versions(rows: TokenRows) -> dict[str, list[int]]:
    """Return the versions of the weights that sampled each completion's first and last token."""
    versions = rows.tokens["weight_version"]
    ends = np.cumsum(rows.lengths).tolist()
    starts = [end - length for end, length in zip(ends, rows.lengths, strict=True)]
    return {
        "version": [int(versions[start]) for start in starts],
        "last_version": [int(versions[end - 1]) for end in ends],
    }


def _advantage(values: np.ndarray) -> float | None:
    """Return a completion's advantage: the largest in magnitude of its tokens', None if unknown."""
    if np.isnan(values).any() or not len(values):
        return None
    return digits(float(values[np.abs(values).argmax()]))


def _halves(steps: Sequence[tuple[int, TokenRows]], name: str) -> np.ndarray:
    """Return a token column as float16 [n], NaN if unknown; its three digits are what is shown."""
    if not steps:
        return np.zeros(0, "<f2")
    values = np.concatenate([rows.tokens[name] for _, rows in steps])
    # The largest float16 is 65504; beyond it values would become infinite.
    return values.clip(-6e4, 6e4).astype("<f2")


def _flags(steps: Sequence[tuple[int, TokenRows]]) -> np.ndarray:
    """Return uint8 [n]: the clip reason's number, plus 16 if improbable, plus 32 if repeated."""
    parts = [np.zeros(0, np.uint8)]
    for _, rows in steps:
        reason = np.where(rows.tokens["clip"] < 0, _UNKNOWN, rows.tokens["clip"])
        flags = reason + 16 * rows.tokens["improbable"] + 32 * rows.tokens["repeated"]
        parts.append(flags.astype(np.uint8))
    return np.concatenate(parts)


def _encoded(values: np.ndarray) -> str:
    """Return an array's bytes in base64."""
    return base64.b64encode(values.tobytes()).decode()


def _column(steps: Sequence[TokenRows], name: str) -> np.ndarray:
    """Return a token column of all steps, [n]."""
    return np.concatenate([rows.tokens[name] for rows in steps])
