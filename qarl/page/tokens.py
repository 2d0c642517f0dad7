"""Recorded completions as a page carries them: as many as its size allows, token columns packed to
eleven bytes a token; and what became of their error tokens.

Axes: n tokens of all completions laid end to end.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.page.figures import digits
from qarl.report.token_files import TokenRows

BUDGET = 1_600_000
"""Bytes of the page that completions may take: 100,000 tokens, and less of short completions."""

_A_TOKEN, _A_COMPLETION = 15, 50
"""Bytes of the page, about; words not counted."""

_SHOWN = ("step", "group", "sample", "age")
"""Columns of completions shown as they are."""

_HALVES = ("sampler_logprob", "mismatch", "log_ratio", "unquantized_logprob")

_UNKNOWN = 15
"""In place of a reason's number."""

_SIGNS = {"A > 0": 1.0, "A < 0": -1.0}
_KINDS = ("sound", "improbable", "in a loop")

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def mismatch_columns(steps: Sequence[TokenRows]) -> Columns | None:
    """Position in the response, sampler's log-prob and mismatch of all these tokens, [n] each,
    where the mismatch is known; None where it is nowhere.
    """
    if not steps:
        return None
    position = np.concatenate([np.arange(length) for rows in steps for length in rows.lengths])
    logprob, mismatch = _column(steps, "sampler_logprob"), _column(steps, "mismatch")
    known = np.isfinite(mismatch)
    return (position[known], logprob[known], mismatch[known]) if known.any() else None


def treatment(kinds: Sequence[Sequence[TokenRows]]) -> list[list[Any]]:
    """What the objective did with error tokens, as QaRL's table 6 (arXiv 2604.07853). kinds: of
    each configuration the steps' rows. A row for each configuration, sign of the advantage and kind
    of token that was learned from: its place, sign, kind, tokens, shares clipped, with a mismatch
    weight that was cut, and left as they were.
    """
    rows: list[list[Any]] = []
    for number, steps in enumerate(kinds):
        if not steps:
            continue
        advantage, clip = _column(steps, "advantage"), _column(steps, "clip")
        kind = np.where(_column(steps, "repeated"), 2, np.where(_column(steps, "improbable"), 1, 0))
        none, corrected = CLIP_REASONS.index("none"), CLIP_REASONS.index("corrected")
        for sign, factor in _SIGNS.items():
            for place, name in enumerate(_KINDS):
                of = clip[(np.sign(advantage) == factor) & (kind == place) & (clip >= 0)]
                if len(of):
                    shares = (
                        (of != none) & (of != corrected),
                        of == corrected,
                        of == none,
                    )
                    rows.append(
                        [
                            number,
                            sign,
                            name,
                            len(of),
                            *(digits(float(share.mean())) for share in shares),
                        ]
                    )
    return rows


def packed_tokens(runs: Sequence[Sequence[TokenRows]]) -> dict[str, Any]:
    """The completions the page shows of each run's steps, spread evenly over them: what each is in
    columns of one value a completion, and their tokens in columns of packed values. recorded,
    shown: how many completions there are.
    """
    recorded = sum(len(rows) for steps in runs for rows in steps)
    budget = BUDGET
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
    """The last step, and of every n steps before it one, with the smallest n that fits: one whose
    completions the unquantized policy was asked about, where there is one. Where the last alone
    does not fit, a part of it.
    """
    costs = [_cost(rows) for rows in steps]
    scored = [bool(np.isfinite(rows.tokens["unquantized_logprob"]).any()) for rows in steps]
    for every in range(1, len(steps) + 1):
        spans = [range(max(0, end - every), end) for end in range(len(steps) - 1, 0, -every)]
        picked = [max(span, key=lambda place: (scored[place], place)) for span in spans]
        places = [*picked[::-1], len(steps) - 1]
        if sum(costs[place] for place in places) <= budget:
            return [steps[place] for place in places]
    if not steps:
        return []
    sizes = np.cumsum([_A_COMPLETION + _A_TOKEN * length for length in steps[-1].lengths])
    return [steps[-1].first(max(1, int((sizes <= budget).sum())))]


def _cost(rows: TokenRows) -> int:
    prompts = sum(len(prompt.encode()) for prompt in set(rows.completions["prompt"]))
    return _A_TOKEN * sum(rows.lengths) + _A_COMPLETION * len(rows) + prompts


def _packed(steps: Sequence[tuple[int, TokenRows]]) -> dict[str, Any]:
    prompts: dict[str, int] = {}
    texts: dict[tuple[int, str], int] = {}
    words: list[int] = []
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "run",
            *_SHOWN,
            "prompt",
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
    }
    for number, rows in steps:
        about, ends = rows.completions, np.cumsum(rows.lengths)
        pairs = zip(rows.tokens["token_id"].tolist(), rows.tokens["token"], strict=True)
        words += (texts.setdefault(pair, len(texts)) for pair in pairs)
        groups = about["group_rewards"]
        for name, values in {
            "run": [number] * len(rows),
            **{name: about[name] for name in _SHOWN},
            "prompt": [prompts.setdefault(prompt, len(prompts)) for prompt in about["prompt"]],
            "reward": map(digits, about["reward"]),
            "length": rows.lengths,
            **_versions(rows),
            "worst": [-1 if place is None else place for place in about["worst_token"]],
            "truncated": [
                int(reason in ("length", "repetition")) for reason in about["finish_reason"]
            ],
            "group_size": map(len, groups),
            "group_reward": [digits(sum(group) / len(group)) for group in groups],
            "advantage": map(_advantage, np.split(rows.tokens["advantage"], ends[:-1])),
        }.items():
            columns[name] += values
    return {
        "prompts": list(prompts),
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
    """Of the weights that sampled each completion's first token, and its last."""
    of_each, ends = rows.tokens["weight_version"], np.cumsum(rows.lengths).tolist()
    starts = [end - length for end, length in zip(ends, rows.lengths, strict=True)]
    return {
        "version": [int(of_each[at]) for at in starts],
        "last_version": [int(of_each[at - 1]) for at in ends],
    }


def _advantage(values: np.ndarray) -> float | None:
    """Of the completion: that of its tokens with the largest magnitude; None where not known."""
    return (
        None
        if np.isnan(values).any() or not len(values)
        else digits(float(values[np.abs(values).argmax()]))
    )


def _halves(steps: Sequence[tuple[int, TokenRows]], name: str) -> np.ndarray:
    """float16 [n], NaN where not known: three digits, which is what the page shows."""
    parts = [rows.tokens[name] for _, rows in steps]
    return np.concatenate(parts).clip(-6e4, 6e4).astype("<f2") if parts else np.zeros(0, "<f2")


def _flags(steps: Sequence[tuple[int, TokenRows]]) -> np.ndarray:
    """uint8 [n]: the reason's number, 15 where not known; 16 where improbable; 32 where
    repeated.
    """
    parts = [np.zeros(0, np.uint8)]
    for _, rows in steps:
        reason = np.where(rows.tokens["clip"] < 0, _UNKNOWN, rows.tokens["clip"])
        flags = reason + 16 * rows.tokens["improbable"] + 32 * rows.tokens["repeated"]
        parts.append(flags.astype(np.uint8))
    return np.concatenate(parts)


def _encoded(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _column(steps: Sequence[TokenRows], name: str) -> np.ndarray:
    return np.concatenate([rows.tokens[name] for rows in steps])
