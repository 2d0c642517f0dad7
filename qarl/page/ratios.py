"""What objectives make of tokens, out of the recorded columns: ratios against mismatch weights and probabilities by the
advantage's sign, what follows an error token, and what became of error tokens in the loss.

As QaRL's figures 4, 5 and 6 and its table 6 (arXiv 2604.07853), whose text with coloured tokens is the browser's.
Axes: n tokens of a configuration's recorded completions laid end to end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qarl.learner.clip_reasons import CLIP_REASONS
from qarl.page.figures import digits, thinned
from qarl.report.token_files import TokenRows

POINTS = 1000
"""Of a scatter, of all configurations together."""

FOLLOWING = 64
"""Tokens after the first improbable one that are looked at."""

_SIGNS = {"A > 0": 1.0, "A < 0": -1.0}
_KINDS = ("sound", "improbable", "in a loop")


def ratio_figures(kinds: Sequence[Sequence[TokenRows]]) -> list[dict[str, Any]]:
    """Scatters of log r_prox over log w and over the sampler's probability, and shares after an error token. kinds: of
    each configuration the steps' rows."""
    figures = []
    for sign, factor in _SIGNS.items():
        picked = [_updated(steps, factor) for steps in kinds]
        most = POINTS // max(1, sum(tokens is not None for tokens in picked))
        name = "positive" if factor > 0 else "negative"
        about = f"Recorded tokens with {sign}: log of the ratio that the objective bounds"
        far = "Half of the points are those farthest out."
        weights, probabilities = [], []
        for number, tokens in enumerate(picked):
            if tokens is None:
                continue
            shown = _shown(*tokens[:2], most)
            ratio, mismatch, logprob = (values[shown] for values in tokens)
            known = np.isfinite(mismatch)
            line = {"of": number, "name": "tokens"}
            if known.any():
                weights.append({**line, "x": _rounded(mismatch[known]), "y": _rounded(ratio[known])})
            probabilities.append({**line, "x": _rounded(np.exp(logprob)), "y": _rounded(ratio)})
        figures += [
            {
                "id": f"ratio-weight-{name}", "title": f"Ratio and mismatch, {sign}",
                "x": "log π_learner/π_sampler, nats", "unit": "nats", "points": True, "log": False, "lines": weights,
                "help": f"{about}, over that of the mismatch weight. {far}",
            },
            {
                "id": f"ratio-probability-{name}",
                "title": f"Ratio and probability, {sign}", "x": "sampler's probability", "unit": "nats", "points": True,
                "log": False, "log_x": True, "lines": probabilities,
                "help": f"{about}, over the sampler's probability. {far}",
            },
        ]  # fmt: skip
    figures.append(
        {
            "id": "after-error", "title": "After the first improbable token", "x": "tokens after it", "unit": "share",
            "log": False, "lines": [line for number, steps in enumerate(kinds) for line in _following(number, steps)],
            "help": "Recorded completions with a token below 0.001: how many of their tokens are error tokens, and how "
            "many were clipped, that far after the first one.",
        }
    )  # fmt: skip
    return [figure for figure in figures if figure["lines"]]


def treatment(kinds: Sequence[Sequence[TokenRows]]) -> list[list[Any]]:
    """A row for each configuration, sign of the advantage and kind of token that was learned from: its place, sign,
    kind, tokens, shares clipped, with a mismatch weight that was cut, and left as they were."""
    rows: list[list[Any]] = []
    for number, steps in enumerate(kinds):
        if not steps:
            continue
        columns = {name: _column(steps, name) for name in ("advantage", "clip", "improbable", "repeated")}
        clip, advantage = columns["clip"], columns["advantage"]
        kind = np.where(columns["repeated"], 2, np.where(columns["improbable"], 1, 0))
        none, corrected = CLIP_REASONS.index("none"), CLIP_REASONS.index("corrected")
        for sign, factor in _SIGNS.items():
            for place, name in enumerate(_KINDS):
                of = clip[(np.sign(advantage) == factor) & (kind == place) & (clip >= 0)]
                if len(of):
                    shares = ((of != none) & (of != corrected), of == corrected, of == none)
                    rows.append([number, sign, name, len(of), *(digits(float(share.mean())) for share in shares)])
    return rows


def _updated(steps: Sequence[TokenRows], factor: float) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Log-ratio, mismatch and the sampler's log-prob of the tokens with an advantage of that sign; None without any."""
    if not steps:
        return None
    names = ("log_ratio", "mismatch", "sampler_logprob")
    ratio, mismatch, logprob = (_column(steps, name) for name in names)
    kept = np.isfinite(ratio) & (np.sign(_column(steps, "advantage")) == factor)
    return (ratio[kept], mismatch[kept], logprob[kept]) if kept.any() else None


def _shown(ratio: np.ndarray, mismatch: np.ndarray, most: int) -> np.ndarray:
    """Places of at most `most` tokens, rising: all, or half of them those farthest from the origin and half evenly."""
    if len(ratio) <= most:
        return np.arange(len(ratio))
    outward = np.argsort(-(np.abs(ratio) + np.nan_to_num(np.abs(mismatch))), kind="stable")
    rest = np.sort(outward[most // 2 :])
    return np.sort(np.concatenate([outward[: most // 2], rest[:: -(-len(rest) // (most - most // 2))]]))


def _following(number: int, steps: Sequence[TokenRows]) -> list[dict[str, Any]]:
    counts = {name: np.zeros(FOLLOWING + 1) for name in ("error tokens", "clipped")}
    seen = {name: np.zeros(FOLLOWING + 1) for name in counts}
    unclipped = (CLIP_REASONS.index("none"), CLIP_REASONS.index("corrected"))
    for rows in steps:
        error = rows.tokens["improbable"] | rows.tokens["repeated"]
        clip = rows.tokens["clip"]
        clipped = ~np.isin(clip, unclipped)
        ends = np.cumsum(rows.lengths)
        for start, end in zip(ends - rows.lengths, ends, strict=True):
            improbable = np.flatnonzero(rows.tokens["improbable"][start:end])
            if len(improbable):
                first = start + improbable[0]
                after = slice(first, min(end, first + FOLLOWING + 1))
                size = after.stop - after.start
                for name, flags, known in (("error tokens", error, True), ("clipped", clipped, clip[first] >= 0)):
                    if known:
                        counts[name][:size] += flags[after]
                        seen[name][:size] += 1
    lines = []
    for name, count in counts.items():
        places = np.flatnonzero(seen[name])
        if len(places):
            values = (count[places] / seen[name][places]).tolist()
            lines.append(thinned({"of": number, "name": name, "x": places.astype(float).tolist(), "y": values}))
    return lines


def _column(steps: Sequence[TokenRows], name: str) -> np.ndarray:
    return np.concatenate([rows.tokens[name] for rows in steps])


def _rounded(values: np.ndarray) -> list[float]:
    return [digits(float(value)) for value in values]
