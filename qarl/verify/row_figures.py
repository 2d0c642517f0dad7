"""Figures of every completion of a dump, from which the causes are judged.

d = log π_trainer − log π_sampler of a token that both sides scored, in nats. A completion is the
unit of every test, because tokens of one completion are not independent.

Axes: B completions, T tokens laid end to end, K bins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qarl.verify.dump import SCALARS, Batch

POSITION_EDGES = (0, 1, 4, 16, 64, 256, 1024, 4096)
"""Lower edges of the bins of positions in a completion, counted from 0."""
PROBABILITY_EDGES = (0.0, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99)
"""Lower edges of the bins of the sampler's probability."""
LENGTH_EDGES = (0, 16, 64, 256, 1024, 4096)
"""Lower edges of the bins of lengths of completions."""
TIGHT = (0.999, 1.002)
"""Ratios π_trainer / π_sampler within this range are those of two right implementations."""

LIKELY = (0.5, 0.98)
"""Range of mean probability in which a temperature moves all tokens in the same direction."""
RARE = 0.1
"""Tokens below this mean probability are moved by a temperature in the other direction mostly."""
_NEAR = 1.0
"""Mean |d| in nats up to which a token that a completion repeats to its end may be sampled: where a
model repeats itself, a truncated sampler has probability 1, and the trainer a high one.
"""
_PADS = 3
"""Least tokens that show that a completion is padded."""
_PROMPT = 3
"""Least tokens of a prompt with which a completion has to begin to be said to hold it."""
_FILLED = 4
"""Least tokens in a row with one constant that show that they were not sampled."""


@dataclass(frozen=True)
class Bins:
    """Sum and number of |d| in bins."""

    edges: tuple[float, ...]
    """Lower edge of each bin."""
    total: np.ndarray
    """Sum of |d|, nats [K]."""
    count: np.ndarray
    """Number of tokens, [K]."""

    @classmethod
    def empty(cls, edges: Sequence[float]) -> "Bins":
        """Return bins without tokens."""
        return cls(tuple(edges), np.zeros(len(edges)), np.zeros(len(edges)))

    def add(self, where: np.ndarray, distance: np.ndarray) -> None:
        """Add tokens. where: what is binned, [T]. distance: |d|, [T]."""
        index = np.searchsorted(self.edges, where, side="right") - 1
        self.total[:] += np.bincount(index, distance, len(self.edges))
        self.count[:] += np.bincount(index, minlength=len(self.edges))


@dataclass
class RowFigures:
    """Figures of all completions of a dump, one array a figure, and of its tokens in bins."""

    clip: tuple[float, float]
    """Ratios outside this range are clipped by the objective."""
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """Figure → its values for one batch after another. `table` joins them."""
    position: Bins = field(default_factory=lambda: Bins.empty(POSITION_EDGES))
    """|d| by position in the completion."""
    probability: Bins = field(default_factory=lambda: Bins.empty(PROBABILITY_EDGES))
    """|d| by the sampler's probability."""

    def table(self) -> dict[str, np.ndarray]:
        """Return figure → its values for all completions, [B]."""
        return {name: np.concatenate(parts) for name, parts in self.columns.items()}

    def add(self, batch: Batch) -> None:
        """Measure the completions of a batch."""
        rows = batch.rows
        starts = np.concatenate([[0], np.cumsum(batch.lengths)[:-1]]).astype(np.int64)
        both = ~(np.isnan(batch.sampler) | np.isnan(batch.trainer))
        prompt, padded = _not_sampled(batch, starts, both)
        filled = _filled(batch, starts, both & ~prompt & ~padded)
        kept = both & ~prompt & ~padded & ~filled
        count = len(batch.lengths)

        def per_row(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
            return np.bincount(rows[mask], values[mask].astype(np.float64), count)

        ones = np.ones(len(rows))
        unscored = ~np.isnan(batch.sampler) & np.isnan(batch.trainer)
        figures = {
            "row": batch.first + np.arange(count),
            "length": batch.lengths.astype(np.float64),
            "tokens": per_row(ones, kept),
            "unscored": per_row(ones, unscored),
            "prompt": per_row(ones, prompt),
            "padded": per_row(ones, padded),
            "filled": per_row(ones, filled),
        }
        nan = np.full(count, np.nan)
        figures |= {name: batch.scalars.get(name, nan) for name in SCALARS if name != "advantage"}
        figures |= self._differences(batch, kept, rows, per_row)
        figures |= _order(batch, kept, starts)
        for name, values in figures.items():
            self.columns.setdefault(name, []).append(values)
        position = np.arange(len(rows)) - np.repeat(starts, batch.lengths)
        distance = np.abs(batch.trainer - batch.sampler)
        self.position.add(position[kept], distance[kept])
        self.probability.add(np.exp(batch.sampler[kept]), distance[kept])

    def _differences(
        self,
        batch: Batch,
        kept: np.ndarray,
        rows: np.ndarray,
        per_row,
    ) -> dict:
        """Return sums of functions of d over each completion's tokens."""
        sampler = np.where(kept, batch.sampler, 0.0)
        trainer = np.where(kept, batch.trainer, 0.0)
        d = trainer - sampler
        ratio = np.exp(np.minimum(d, 50))
        outside = (ratio < self.clip[0]) | (ratio > self.clip[1])
        figures = {
            "abs": np.abs(d),
            "equal": d == 0,
            "d": d,
            "k2": d * d / 2,
            "k3": ratio - 1 - d,
            "ratio": ratio,
            "inverse": np.exp(np.minimum(-d, 50)),
            "loose": (ratio < TIGHT[0]) | (ratio > TIGHT[1]),
            "outside": outside,
            "sampler": sampler,
            "trainer": trainer,
            "sampler2": sampler**2,
            "trainer2": trainer**2,
            "product": sampler * trainer,
            "below": np.maximum(-d, 0),
        }
        if batch.advantages is not None:
            low, high = self.clip
            active = np.where(batch.advantages > 0, ratio > high, ratio < low)
            figures["phantom"] = active & (np.nan_to_num(batch.advantages) != 0)
        trainer_probability = np.exp(np.minimum(trainer, 0))
        probability = (np.exp(sampler) + trainer_probability) / 2
        likely = (probability > LIKELY[0]) & (probability < LIKELY[1])
        rare = probability < RARE
        figures |= {
            "likely": likely,
            "likely_below": np.maximum(-d, 0) * likely,
            "likely_abs": np.abs(d) * likely,
            "rare": rare,
            "rare_below": np.maximum(-d, 0) * rare,
            "rare_abs": np.abs(d) * rare,
        }
        figures |= _logits(sampler, trainer)
        sums = {name: per_row(np.asarray(values), kept) for name, values in figures.items()}
        if "phantom" not in sums:
            sums["phantom"] = np.full(len(batch.lengths), np.nan)
        sums["max"] = np.zeros(len(batch.lengths))
        np.maximum.at(sums["max"], rows[kept], np.abs(d)[kept])
        return sums


def _logits(sampler: np.ndarray, trainer: np.ndarray) -> dict[str, np.ndarray]:
    """Return the moments of x = logit p and y = logit q of tokens that both sides find likely."""
    q = np.exp(np.minimum(sampler, -1e-9))
    p = np.exp(np.minimum(trainer, -1e-9))
    lower = np.minimum(p, q)
    both = (lower > 0.5) & (np.maximum(p, q) < 0.999)
    x = np.where(both, np.log(p / (1 - p)), 0)
    y = np.where(both, np.log(q / (1 - q)), 0)
    return {
        "logit": both,
        "logit_x": x,
        "logit_y": y,
        "logit_xx": x * x,
        "logit_xy": x * y,
    }


def _not_sampled(
    batch: Batch, starts: np.ndarray, both: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that stand in completions but belong to prompts, and those that pad, bool
    [T] each.

    A completion holds its prompt if it begins with all its tokens.
    """
    prompt = np.zeros(len(both), dtype=bool)
    if batch.prompts is not None:
        for start, length, before in zip(starts, batch.lengths, batch.prompts, strict=True):
            n = len(before)
            if _PROMPT <= n < length and np.array_equal(batch.token_ids[start : start + n], before):
                prompt[start : start + n] = True
    return prompt, _padding(batch, starts, both)


def _padding(batch: Batch, starts: np.ndarray, both: np.ndarray) -> np.ndarray:
    """Return the tokens that pad, bool [T].

    A completion is padded if it ends in one token, again and again, to which one side gives the
    very same number each time and the other side does not: no model does that. Where one
    completion shows it, every other that ends in this token with this number is padded too.
    """
    padded = np.zeros(len(both), dtype=bool)
    for ours, other in ((batch.sampler, batch.trainer), (batch.trainer, batch.sampler)):
        runs = []
        kinds = set()
        for start, length in zip(starts, batch.lengths, strict=True):
            end = start + length
            if not length or not both[end - 1]:
                continue
            ids = batch.token_ids[start:end]
            same = (ids == ids[-1]) & (ours[start:end] == ours[end - 1])
            first = start + 1 + int(np.max(np.flatnonzero(~same), initial=-1))
            kind = (int(ids[-1]), float(ours[end - 1]))
            runs.append((first, end, kind))
            tail = slice(first, end)
            far = np.abs(other[tail] - ours[tail]).mean() > _NEAR
            if end - first >= _PADS and np.ptp(other[tail]) > 0 and far:
                kinds.add(kind)
        for first, end, kind in runs:
            padded[first:end] |= kind in kinds
    return padded & both


def _filled(batch: Batch, starts: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """Return the tokens that one side gives the very same number, one after another, and the other
    side quite other ones, bool [T]. Frameworks fill in a constant for tokens of prompts, tools and
    environments, which nobody sampled.

    judged: tokens to look at, bool [T].
    """
    filled = np.zeros(len(judged), dtype=bool)
    distance = np.abs(batch.trainer - batch.sampler)
    for side, other in ((batch.sampler, batch.trainer), (batch.trainer, batch.sampler)):
        goes_on = np.zeros(len(judged), dtype=bool)
        goes_on[1:] = judged[1:] & judged[:-1] & (side[1:] == side[:-1])
        goes_on[starts[batch.lengths > 0]] = False
        firsts = np.flatnonzero(~goes_on)
        ends = np.append(firsts[1:], len(judged))
        runs = (ends - firsts >= _FILLED) & judged[firsts]
        for first, end in zip(firsts[runs], ends[runs], strict=True):
            run = slice(first, end)
            filled[run] |= distance[run].mean() > _NEAR and np.ptp(other[run]) > 0
    return filled


def _order(
    batch: Batch,
    kept: np.ndarray,
    starts: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return figures of each completion that need its tokens in order.

    "median": median |d|. "early", "late": mean |d| over its first and last third. "lag0", "lag1",
    "lag-1": mean |log π_trainer of token t − log π_sampler of token t + lag|. All NaN for
    completions of less than 6 scored tokens.
    """
    names = ("median", "early", "late", "lag0", "lag1", "lag-1")
    figures = {name: np.full(len(starts), np.nan) for name in names}
    for row, (start, length) in enumerate(zip(starts, batch.lengths, strict=True)):
        mask = kept[start : start + length]
        sampler = batch.sampler[start : start + length][mask]
        trainer = batch.trainer[start : start + length][mask]
        n = len(sampler)
        if n < 6:
            continue
        distance = np.abs(trainer - sampler)
        figures["median"][row] = np.median(distance)
        figures["early"][row] = distance[: n // 3].mean()
        figures["late"][row] = distance[-(n // 3) :].mean()
        figures["lag0"][row] = distance.mean()
        ahead = trainer[:-1] - sampler[1:]
        behind = trainer[1:] - sampler[:-1]
        figures["lag1"][row] = np.abs(ahead).mean()
        figures["lag-1"][row] = np.abs(behind).mean()
    return figures
