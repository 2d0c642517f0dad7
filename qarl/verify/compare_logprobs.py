"""Compare two sides' log-probs of sampled tokens, from dumps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from qarl.configs.words import did_you_mean, few
from qarl.verify.causes import ages, judge
from qarl.verify.dump import OPTIONAL, read_dumps
from qarl.verify.findings import Report, VerifyInputError
from qarl.verify.lines import outcome_lines, wrapped
from qarl.verify.row_figures import LENGTH_EDGES, TIGHT, Bins, RowFigures

FLOOR = 0.05
"""Mean |Δ log p| in nats up to which two right implementations of a model usually stay, which
weights in 4 bits on one side exceed.
"""
CLIP = (0.8, 1.2)
"""Ratios outside this range are clipped by GRPO's usual objective."""


@dataclass(frozen=True)
class Bin:
    """Mean |Δ log p| of some tokens."""

    label: str
    """Which tokens, such as "16-63"."""
    mean_abs: float
    """Their mean |Δ log p|, nats."""
    tokens: int
    """Their number."""


@dataclass(frozen=True)
class LogprobsReport(Report):
    """Outcome of a comparison of log-probs. d = log π_trainer − log π_sampler, nats."""

    compared: ClassVar[str] = "log-probs"

    completions: int
    """Number of completions."""
    tokens: int
    """Number of tokens that both sides scored."""
    mean_abs: float
    """Mean |d|."""
    max_abs: float
    """Largest |d|."""
    equal: float
    """Fraction of tokens with d = 0 to the last bit."""
    k1: float
    """Mean of −d, an estimate of KL(sampler ‖ trainer)."""
    k2: float
    """Mean of d²/2, another."""
    k3: float
    """Mean of exp(d) − 1 − d, another."""
    outside_tight: float
    """Fraction of tokens whose ratio exp(d) is outside [0.999, 1.002]."""
    outside_clip: float
    """Fraction of tokens whose ratio is outside the clip range."""
    phantom: float | None
    """Fraction of tokens whose gradient the clip removes by the difference of the two sides alone,
    with weights of age 0 or unknown age; None without advantages.
    """
    by_position: tuple[Bin, ...]
    """Bins by position in the completion."""
    by_probability: tuple[Bin, ...]
    """Bins by the sampler's probability."""
    by_length: tuple[Bin, ...]
    """Bins by the completion's length."""
    by_age: tuple[Bin, ...]
    """Bins by age in versions; () if unknown."""

    def lines(self, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` characters."""
        phantom = "-" if self.phantom is None else f"{self.phantom:.3%}"
        rows = [
            ("completions, tokens compared", f"{self.completions:,}, {self.tokens:,}"),
            ("|Δ log p| mean, max", f"{self.mean_abs:.3g}, {self.max_abs:.3g} nats"),
            ("equal to the last bit", f"{self.equal:.2%}"),
            ("KL k1, k2, k3", f"{self.k1:.2e}, {self.k2:.2e}, {self.k3:.2e}"),
            (f"ratio outside {list(TIGHT)}", f"{self.outside_tight:.2%}"),
            ("ratio outside the clip range", f"{self.outside_clip:.3%}"),
            ("phantom clipping", phantom),
        ]
        lines = [f"{name:<32}{value}" for name, value in rows]
        for title, bins in (
            ("position", self.by_position),
            ("probability", self.by_probability),
            ("length", self.by_length),
            ("age", self.by_age),
        ):
            text = "  ".join(f"{each.label}: {each.mean_abs:.2g}" for each in bins)
            lines += wrapped(f"mean |Δ log p| by {title}: ", text or "unknown", width)
        return lines + outcome_lines(self, width)


def logprobs(
    *dumps: str | Path, floor: float = FLOOR, clip: tuple[float, float] = CLIP
) -> LogprobsReport:
    """Compare the sampler's log-probs of sampled tokens with the trainer's.

    Args:
        dumps: Parquet or JSONL files, folders of them, or runs of `qarl train`; see
            docs/guide/verify.md for the columns.
        floor: Mean |Δ log p| in nats up to which a difference counts as rounding. Measure it with
            an unquantized engine.
        clip: Ratios outside this range are clipped by the objective.

    Raises:
        VerifyInputError: A dump cannot be read, or holds what it cannot hold; `floor` or `clip` is
            out of range.
    """
    if not floor >= 0:
        raise VerifyInputError(f"floor {floor!r} must be a number of nats from 0 up")
    if not 0 <= clip[0] < 1 < clip[1]:
        raise VerifyInputError(f"clip {clip!r} must be two ratios around 1, such as {CLIP}")
    figures = RowFigures(clip)
    unused: set[str] = set()
    for batch in read_dumps(dumps, unused):
        figures.add(batch)
    table = figures.table()
    judged = judge(table, floor)
    if not table["tokens"].any() and not any(cause.level == "fault" for cause in judged.causes):
        raise VerifyInputError(
            f"{few([str(path) for path in dumps])}: no token has log-probs of both sides, so that"
            " nothing can be compared; write sampler_logprobs and trainer_logprobs of sampled"
            " tokens"
        )
    unchecked = list(judged.unchecked)
    if unused:
        near = "".join(did_you_mean(name, OPTIONAL, 0.8) for name in sorted(unused))
        unchecked.append(f"columns without a meaning here: {', '.join(sorted(unused))}{near}")
    tokens = int(table["tokens"].sum())

    def mean(figure: str) -> float:
        return float(table[figure].sum() / tokens) if tokens else float("nan")

    return LogprobsReport(
        causes=tuple(sorted(judged.causes, key=lambda cause: cause.level != "fault")),
        unchecked=tuple(unchecked),
        completions=len(table["tokens"]),
        tokens=tokens,
        mean_abs=mean("abs"),
        max_abs=float(table["max"].max()),
        equal=mean("equal"),
        k1=-mean("d"),
        k2=mean("k2"),
        k3=mean("k3"),
        outside_tight=mean("loose"),
        outside_clip=mean("outside"),
        phantom=_phantom(table),
        by_position=_bins(figures.position, "0", 1),
        by_probability=_bins(figures.probability, "", None),
        by_length=_row_bins(table, table["length"], LENGTH_EDGES),
        by_age=_by_age(table),
    )


def _phantom(table: dict[str, np.ndarray]) -> float | None:
    """Return the fraction of tokens of age 0 or unknown age that are clipped; None if unknown."""
    age = ages(table)
    mask = ~np.isnan(table["phantom"]) & (np.isnan(age) | (age == 0))
    tokens = table["tokens"][mask].sum()
    return float(table["phantom"][mask].sum() / tokens) if tokens else None


def _bins(bins: Bins, first: str, step: int | None) -> tuple[Bin, ...]:
    """Return the bins that hold tokens. step: distance of whole numbers; None for real numbers."""
    labels = []
    for low, high in zip(bins.edges, [*bins.edges[1:], None], strict=True):
        if high is None:
            labels.append(f"{low:g}+")
        elif step is not None:
            labels.append(first if high == 1 else f"{low:g}-{high - step:g}")
        else:
            labels.append(f"<{high:g}")
    return tuple(
        Bin(label, float(total / count), int(count))
        for label, total, count in zip(labels, bins.total, bins.count, strict=True)
        if count
    )


def _row_bins(
    table: dict[str, np.ndarray], values: np.ndarray, edges: Sequence[float]
) -> tuple[Bin, ...]:
    """Return bins of completions by a value of each."""
    index = np.searchsorted(edges, values, side="right") - 1
    bins = Bins(
        tuple(edges),
        np.bincount(index, table["abs"], len(edges)),
        np.bincount(index, table["tokens"], len(edges)),
    )
    return _bins(bins, "0", 1)


def _by_age(table: dict[str, np.ndarray]) -> tuple[Bin, ...]:
    age = ages(table)
    bins = []
    for each in np.unique(age[~np.isnan(age)]):
        tokens = table["tokens"][age == each].sum()
        if tokens:
            bins.append(
                Bin(f"{each:g}", float(table["abs"][age == each].sum() / tokens), int(tokens))
            )
    return tuple(bins)
