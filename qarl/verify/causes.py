"""Tell apart why two sides' log-probs differ, from figures of completions.

Every cause has a signature that the others lack, and is judged on the completions that no earlier
cause explains. q is the sampler's probability of a token, p the trainer's, d = log p − log q.

Padding, prompts, tokens that nobody sampled: structure (`row_figures`). Shift: p of one token is q
of the next. Stale: |d| grows with the age of the weights. Single completions: their median |d| is
far from that of the others of their age and sampling. Truncation: q is renormalized over a set S,
so that d = log p(S) ≤ 0 for every token, likely or rare. Temperature: q ∝ p^(1/τ), so that for τ <
1 a token with p > 1/2 has q > p without exception, because logit q ≥ logit(p)/τ, while rare tokens
mostly have q < p; for τ > 1 the reverse. What is left is rounding or another set of weights, by its
size.

Axes: B completions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qarl.verify.findings import Cause
from qarl.verify.remedies import remedy

Table = dict[str, np.ndarray]
"""Figure of `RowFigures.table` → its values, [B]."""

_SIDED = 0.9
"""Fraction of |d| on one side of 0 from which tokens count as moved in one direction."""
_ONE_WAY = 0.75
"""Fraction of |d| on one side of 0, of likely and of rare tokens, from which log-probs count as
renormalized. Rounding on top of it makes it less than 1.
"""
_LEAST_TOKENS = 30
"""Least tokens on which a temperature or a truncation is judged."""
_FEWEST_LIKELY = 8
"""Least likely tokens for a temperature; below 30 all have to move in the same direction."""
_LEAST = 3e-4
"""Mean |d| in nats up to which directions are rounding."""
_FAR = 0.3
"""Median |d| in nats above which two sides may score other tokens or another model."""
_APART = 5.0
"""Standard errors from which two means count as different."""
_JUMP = 2.0
"""Factor by which mean |d| jumps from the first version to the next if the engine's reload left
something out. Rounding keeps its size from one version to the next.
"""
_GROWTH = 3.0
"""Factor by which mean |d| grows from the first third of the versions to the last if the engine
takes no update.
"""
_FEW_VERSIONS = 8
"""Number of versions in which rounding does not grow by training itself."""
_GROWTH_OF_FEW = (1.5, 4.0)
"""`_GROWTH` within so few versions, and the standard errors that show it. Those of a clean run of
five versions were at most 1.2 and 1.7.
"""
_STEEP = 0.004
"""Least change of d with log p, in nats a nat, for a temperature; 0.99 makes twice that."""
_ABOVE_ROUNDING = 10.0
"""Factor above what rounding could make from which that change is a temperature's."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class Judged:
    """The causes, and the completions on which the last of them was judged."""

    causes: tuple[Cause, ...]
    """Causes in the order in which they were found."""
    unchecked: tuple[str, ...]
    """What could not be judged, in sentences."""


def judge(table: Table, floor: float) -> Judged:
    """Return the causes for which log-probs differ.

    Args:
        table: figures of all completions.
        floor: mean |d| in nats up to which a difference is rounding.
    """
    causes = list(_structure(table))
    unchecked = list(_unknown(table))
    if not table["tokens"].sum():
        return Judged(tuple(causes), (*unchecked, "no token has log-probs of both sides"))
    shift = _shift(table)
    if shift is not None:
        unchecked.append("causes behind the shift: correct it, and compare again")
        return Judged((*causes, shift), tuple(unchecked))
    stale, fresh = _stale(table)
    causes += [] if stale is None else [stale]
    single, kept = _single(table, floor)
    causes += [] if single is None else [single]
    rest = _rows(table, fresh & kept)
    if not rest["tokens"].sum():
        rest = _rows(table, kept)
    if single is not None and single.name == "unrelated":
        return Judged(tuple(causes), tuple(unchecked))
    sampling = _truncation(rest) or _temperature(rest)
    if sampling is not None:
        causes.append(sampling)
        unchecked.append(f"weights and kernels, behind the {sampling.name}")
    else:
        causes.append(_level(rest, floor, causes))
        cut = _cuts(rest)
        if cut and causes[-1].name != "equal":
            unchecked.append(
                f"whether one side renormalizes by {cut}, which the dump records: the difference of"
                " the two sides may hide it"
            )
        if causes[-1].name == "rounding" and _mean(rest) > floor / 10:
            unchecked.append(
                "whether an 8-bit scheme is on one side alone: its size is that of 16-bit rounding;"
                " `qarl verify weights` tells"
            )
        if rest["likely"].sum() < _FEWEST_LIKELY and causes[-1].level == "fault":
            unchecked.append(
                f"temperature: {int(rest['likely'].sum())} tokens alone have a probability of"
                " 0.5 to 0.98, so that its direction does not show"
            )
    return Judged(tuple(causes), tuple(unchecked))


def _rows(table: Table, mask: np.ndarray) -> Table:
    return {name: values[mask] for name, values in table.items()}


def _mean(table: Table, figure: str = "abs", over: str = "tokens") -> float:
    """Return a figure's mean a token; 0 if there is no token."""
    tokens = table[over].sum()
    return float(table[figure].sum() / tokens) if tokens else 0.0


def _numbers(rows: np.ndarray) -> tuple[str, ...]:
    return tuple(f"row {int(row)}" for row in rows)


def _structure(table: Table) -> Iterator[Cause]:
    """Yield the causes that the tokens themselves show."""
    padded = table["padded"] > 0
    if padded.any():
        yield Cause(
            name="padding",
            level="fault",
            evidence=(
                f"{int(table['padded'].sum())} tokens at the end of {int(padded.sum())} completions"
                " repeat one id, and one side has a constant in place of log-probs; all figures"
                " leave them out"
            ),
            remedy="mask tokens after the end token before scoring and before the loss",
            about=_numbers(table["row"][padded]),
        )
    filled = table["filled"] > 0
    if filled.any():
        yield Cause(
            name="not-sampled",
            level="fault",
            evidence=(
                f"{int(table['filled'].sum())} tokens of {int(filled.sum())} completions have one"
                f" constant in place of a side's log-probs, {int(table['filled'][filled].min())} or"
                " more in a row: prompts, answers of tools or of the environment; all figures leave"
                " them out"
            ),
            remedy="mask tokens that the engine did not sample before scoring and before the loss",
            about=_numbers(table["row"][filled]),
        )
    prompt = table["prompt"] > 0
    if prompt.any():
        everywhere = prompt.mean() >= 0.5
        yield Cause(
            name="prompt",
            level="fault" if everywhere else "note",
            evidence=(
                f"{int(prompt.sum())} of {len(prompt)} completions begin with all tokens of their"
                f" prompt, {int(table['prompt'].sum())} tokens; all figures leave them out"
            ),
            remedy="score and learn from completions alone: cut the prompt from completion_ids",
            about=_numbers(table["row"][prompt]),
        )


def _unknown(table: Table) -> Iterator[str]:
    """Yield what the dump's columns do not show."""
    if np.isnan(ages(table)).all():
        yield "staleness: the dump has no weight_version and trainer_version (or age)"
    options = ("temperature", "top_p", "top_k")
    absent = [name for name in options if np.isnan(table[name]).all()]
    if absent:
        yield f"effects of {', '.join(absent)} by their values: the dump has no such columns"
    if table["unscored"].sum():
        yield (
            f"{int(table['unscored'].sum())} sampled tokens without the trainer's log-prob (null)"
        )
    for name, neutral in (
        ("repetition_penalty", 1.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
    ):
        values = table[name][~np.isnan(table[name])]
        if (values != neutral).any():
            yield (
                f"{name} {values[values != neutral][0]:g}: the trainer cannot repeat it without the"
                f" whole history; sample with {neutral:g}"
            )
    hot = table["temperature"][~np.isnan(table["temperature"])]
    if (hot != 1).any() and _mean(table) <= _LEAST:
        yield (
            f"whether both sides' log-probs are at temperature {hot[hot != 1][0]:g}, or both at 1:"
            " they agree either way"
        )


def _shift(table: Table) -> Cause | None:
    """Return the cause if one side's log-probs are those of the next or the previous token."""
    measured = ~np.isnan(table["lag0"])
    if not measured.any() or np.median(table["lag0"][measured]) < _LEAST:
        return None
    for lag in (1, -1):
        moved = table[f"lag{lag}"] < 0.25 * table["lag0"]
        fraction = moved[measured].mean()
        if fraction < 0.5:
            continue
        return Cause(
            name="shift",
            level="fault",
            evidence=(
                f"in {fraction:.0%} of completions trainer_logprobs of token t agree with the"
                f" sampler's of token t{lag:+d}: mean |Δ|"
                f" {np.nanmean(table[f'lag{lag}'][moved]):.2g} nats, in place of"
                f" {np.nanmean(table['lag0'][moved]):.2g}"
            ),
            remedy=(
                "logits[:, t] score token t + 1: gather logits[:, :-1] at ids[:, 1:], and take the"
                " last len(completion) of them"
            ),
        )
    return None


def ages(table: Table) -> np.ndarray:
    """Return each completion's age in versions, [B]; NaN if unknown."""
    computed = table["trainer_version"] - table["weight_version"]
    return np.where(np.isnan(table["age"]), computed, table["age"])


def _row_means(table: Table, mask: np.ndarray) -> np.ndarray:
    mask = mask & (table["tokens"] > 0)
    return table["abs"][mask] / table["tokens"][mask]


def _differ(low: np.ndarray, high: np.ndarray, factor: float, errors: float = _APART) -> bool:
    """Return whether the mean of `high` is above `factor` times that of `low`, by so many standard
    errors.
    """
    if len(low) < 3 or len(high) < 3:
        return False
    variance = np.var(low) / len(low) + np.var(high) / len(high)
    gap = high.mean() - low.mean()
    least = max(errors * math.sqrt(variance), _LEAST)
    return bool(high.mean() > factor * low.mean() and gap > least)


def _stale(table: Table) -> tuple[Cause | None, np.ndarray]:
    """Return the cause if |d| grows with age or version, and the completions it does not touch."""
    age = ages(table)
    known = age[~np.isnan(age)]
    if len(known) and known.max() > known.min():
        youngest = age == known.min()
        older = age > known.min()
        if _differ(_row_means(table, youngest), _row_means(table, older), 1.5):
            figures = ", ".join(
                f"age {int(each)}: {_mean(_rows(table, age == each)):.2g}"
                for each in np.unique(known)[:6]
            )
            proven = "" if known.min() == 0 else "; no completion has age 0 to compare with"
            cause = Cause(
                name="stale",
                level="fault",
                evidence=f"mean |Δ log p| by age in versions: {figures} nats{proven}",
                remedy=remedy("stale"),
                about=_numbers(table["row"][older]),
            )
            return cause, youngest
    version = np.where(
        np.isnan(table["trainer_version"]), table["weight_version"], table["trainer_version"]
    )
    return _missed(table, version)


def _missed(table: Table, version: np.ndarray) -> tuple[Cause | None, np.ndarray]:
    """Return the cause if |d| grows with the version at the same recorded age, and the completions
    it does not touch.

    An engine that takes no update drifts away from version to version. One whose reload leaves a
    layer out agrees at first, because both sides load the same checkpoint, and parts at the first
    reload.
    """
    everything = np.ones(len(version), dtype=bool)
    versions = np.unique(version[~np.isnan(version)])
    if len(versions) < 3:
        return None, everything
    known = version[~np.isnan(version)]
    oldest = version == versions[0]
    second = version == versions[1]
    if _differ(_row_means(table, oldest), _row_means(table, second), _JUMP) and _differ(
        _row_means(table, oldest), _row_means(table, version > versions[1]), _JUMP
    ):
        later = version > versions[0]
        text = (
            f"mean |Δ log p| is {_mean(_rows(table, oldest)):.2g} at version {int(versions[0])},"
            f" {_mean(_rows(table, second)):.2g} at {int(versions[1])}, the next, and"
            f" {_mean(_rows(table, later)):.2g} from there on: that update was not taken, or not by"
            " every layer"
        )
        if np.isnan(ages(table)).all():
            text += ", or not yet (the dump does not say which version sampled)"
        return _stale_rows(table, later, text), oldest
    first = version <= np.quantile(known, 0.34)
    last = version >= np.quantile(known, 0.67)
    bound = (_GROWTH, _APART) if len(versions) > _FEW_VERSIONS else _GROWTH_OF_FEW
    if not _differ(_row_means(table, first), _row_means(table, last), *bound):
        return None, everything
    text = (
        f"mean |Δ log p| grows with the version, from {_mean(_rows(table, first)):.2g} at"
        f" {int(known.min())} to {_mean(_rows(table, last)):.2g} at {int(known.max())}, at the same"
        " recorded age: the engine names versions that it did not take"
    )
    return _stale_rows(table, last, text), oldest


def _stale_rows(table: Table, rows: np.ndarray, evidence: str) -> Cause:
    return Cause(
        name="stale",
        level="fault",
        evidence=evidence,
        remedy=(
            "publish every tensor before sampling; `qarl verify weights TRAINER ENGINE` names the"
            " layers that the engine did not take"
        ),
        about=_numbers(table["row"][rows]),
    )


def _single(table: Table, floor: float) -> tuple[Cause | None, np.ndarray]:
    """Return the cause if a few completions are wrong altogether, or all are, and the others.

    A completion is compared with those of its own age and sampling. One whose median |d| is at most
    the floor is rounded otherwise, such as by another choice of experts.
    """
    median = table["median"]
    kept = np.ones(len(median), dtype=bool)
    measured = ~np.isnan(median)
    if measured.sum() < 4:
        return None, kept
    correlation = _correlation(table)
    if np.median(median[measured]) > _FAR and correlation < 0.5:
        text = f"over all tokens the two sides' log-probs correlate by {correlation:.2f}"
        return Cause(
            name="unrelated",
            level="fault",
            evidence=f"{text} alone, mean |Δ log p| {_mean(table):.2g} nats",
            remedy=(
                "the sides score other tokens or another model: compare prompt token ids (chat"
                " template, BOS) and the checkpoint's name, then `qarl verify weights`"
            ),
        ), kept
    keys = np.stack([ages(table), *(table[name] for name in _SAMPLING)])
    _, group = np.unique(np.nan_to_num(keys, nan=-1), axis=1, return_inverse=True)
    wrong = np.zeros(len(median), dtype=bool)
    for each in np.unique(group):
        of_group = (group.ravel() == each) & measured
        if of_group.sum() < 4:
            continue
        usual = np.median(median[of_group])
        wrong |= of_group & (median > 8 * usual) & (median > floor)
    if not wrong.any():
        return None, kept
    usual = np.median(median[measured & ~wrong])
    cause = Cause(
        name="sequences",
        level="fault",
        evidence=(
            f"{int(wrong.sum())} of {int(measured.sum())} completions have a median |Δ log p| of"
            f" {np.median(median[wrong]):.2g} nats, the others of {usual:.2g}; from their first"
            f" third on ({table['early'][wrong].mean():.2g})"
        ),
        remedy=(
            "compare these prompts' token ids on both sides: a chat template, a BOS or a system"
            " prompt that one side adds, a prompt cut on one side, or weights of another version"
        ),
        about=_numbers(table["row"][wrong]),
    )
    return cause, ~wrong


def _correlation(table: Table) -> float:
    """Return the correlation of the two sides' log-probs over all tokens; 1 if they are constant.

    This is Pearson's coefficient, from sums over completions.
    """
    n = table["tokens"].sum()
    x = table["sampler"].sum() / n
    y = table["trainer"].sum() / n
    x_variance = table["sampler2"].sum() / n - x * x
    y_variance = table["trainer2"].sum() / n - y * y
    spread = x_variance * y_variance
    if spread <= 0:
        return 1.0
    covariance = table["product"].sum() / n - x * y
    return float(covariance / math.sqrt(spread))


def _sided(table: Table, kind: str = "") -> float:
    """Return the fraction of |d| that is below 0; of all tokens, or of likely or rare ones."""
    prefix = f"{kind}_" if kind else ""
    total = table[f"{prefix}abs"].sum()
    return float(table[f"{prefix}below"].sum() / total) if total else 0.5


def _truncation(table: Table) -> Cause | None:
    """Return the cause if one side's probabilities are renormalized over a set of tokens."""
    if table["tokens"].sum() < _LEAST_TOKENS or _mean(table) < _LEAST:
        return None
    below = _sided(table) > 0.5
    sides = ("sampler", "trainer") if below else ("trainer", "sampler")
    fractions = [_sided(table, kind) for kind in ("", "likely", "rare")]
    mass, likely, rare = (each if below else 1 - each for each in fractions)
    kept, error = _calibration(table, "ratio" if below else "inverse")
    judged = [
        fraction
        for kind, fraction in (("likely", likely), ("rare", rare))
        if table[kind].sum() >= _LEAST_TOKENS
    ]
    if mass < _ONE_WAY or min(judged, default=1) < _ONE_WAY or 1 - kept < _APART * error:
        return None
    text = _recorded(table, ("top_p", "top_k", "min_p"))
    return Cause(
        name="truncation",
        level="fault",
        evidence=(
            f"{mass:.1%} of all |Δ log p| is the {sides[0]}'s probability above the {sides[1]}'s,"
            f" of rare tokens {rare:.1%}: the {sides[0]} renormalizes over a set that holds"
            f" {kept:.3f} ± {error:.1g} of the {sides[1]}'s probability{text}"
        ),
        remedy=remedy("truncation"),
    )


def _cuts(table: Table) -> str:
    """Return the recorded options that leave tokens out, such as "top_k 20"; "" if none do."""
    cut = {
        "top_p": table["top_p"] < 1,
        "top_k": table["top_k"] > 0,
        "min_p": table["min_p"] > 0,
    }
    return ", ".join(f"{name} {table[name][rows][0]:g}" for name, rows in cut.items() if rows.any())


def _recorded(table: Table, names: tuple[str, ...]) -> str:
    """Return the recorded values of sampling options as a clause."""
    columns = {name: table[name] for name in names}
    values = {name: np.unique(column[~np.isnan(column)]) for name, column in columns.items()}
    parts = [
        f"{n} {', '.join(f'{v:g}' for v in each[:3])}" for n, each in values.items() if len(each)
    ]
    return f"; recorded is {', '.join(parts)}" if parts else ""


def _temperature(table: Table) -> Cause | None:
    """Return the cause if one side's logits are those of the other, divided by a temperature."""
    signature = _one_direction(table) or _steepness(table)
    if signature is None:
        return None
    forward = _calibration(table, "ratio")
    backward = _calibration(table, "inverse")
    drawn = ""
    if _fits(forward) and not _fits(backward):
        drawn = "; tokens were drawn from the sampler's log-probs, so the trainer forgot it"
    elif _fits(backward) and not _fits(forward):
        drawn = "; tokens were drawn from the trainer's log-probs, so the sampler's are raw"
    return Cause(
        name="temperature",
        level="fault",
        evidence=(
            f"{signature}: logits differ by a temperature{_estimated_temperature(table)}"
            f"{_recorded(table, ('temperature',))}{drawn}"
        ),
        remedy=remedy("temperature"),
    )


def _one_direction(table: Table) -> str | None:
    """Return the evidence if a temperature moves nearly all likely tokens in one direction."""
    if table["likely"].sum() < _FEWEST_LIKELY or _mean(table, "likely_abs", "likely") < _LEAST:
        return None
    sided = _SIDED if table["likely"].sum() >= _LEAST_TOKENS else 0.98
    likely = _sided(table, "likely")
    colder = likely > 0.5  # the sampler is
    mass = likely if colder else 1 - likely
    rare = 1 - _sided(table, "rare") if colder else _sided(table, "rare")
    if mass < sided or (table["rare"].sum() >= _LEAST_TOKENS and rare < 0.4):
        return None
    return (
        f"of likely tokens {mass:.1%} of |Δ log p| is the {'sampler' if colder else 'trainer'}'s"
        f" probability above the other's, of rare ones {rare:.0%} is below"
    )


def _steepness(table: Table) -> str | None:
    """Return the evidence if a temperature near 1 shows below rounding of its own size.

    To first order d = (1 − 1 / τ) (log p + H) with the entropy H, so that d is linear in
    m = (log p + log q) / 2. Its covariance with m is (var log p − var log q) / 2, and rounding of
    one side makes it E[d²] / 2 at most. Tokens that are drawn from one of the two sides calibrate
    it; those of a truncated sampler do not.
    """
    n = table["tokens"].sum()
    if n < _LEAST_TOKENS or _mean(table) < _LEAST:
        return None
    mean = (table["sampler"] + table["trainer"]).sum() / (2 * n)
    squares = (table["sampler2"] + 2 * table["product"] + table["trainer2"]).sum() / 4
    products = (table["trainer2"] - table["sampler2"]) / 2 - mean * table["d"]
    spread = squares - n * mean**2
    error = math.sqrt(((products - products.mean()) ** 2).sum())
    gap = abs(products.sum())
    if gap < max(_STEEP * spread, 4 * error, _ABOVE_ROUNDING * table["k2"].sum()):
        return None
    if not any(_fits(_calibration(table, figure)) for figure in ("ratio", "inverse")):
        return None
    return (
        f"Δ log p changes by {products.sum() / spread:+.2g} ± {error / spread:.1g} with a nat of"
        f" log p, {gap / table['k2'].sum():.0f} times as much as rounding of this size could make"
    )


def _fits(calibration: tuple[float, float]) -> bool:
    """Return whether a mean ratio, with its standard error, is 1."""
    mean, error = calibration
    return abs(mean - 1) < 3 * error


def _estimated_temperature(table: Table) -> str:
    """Return the sampler's temperature over the trainer's, as a clause.

    For a token with p > 1/2 logit q = logit(p) / τ + h, where h depends on how the other tokens
    share 1 − p. So 1 / τ is the slope of logit q over logit p.
    """
    n, x, y, xx, xy = (
        table[name].sum() for name in ("logit", "logit_x", "logit_y", "logit_xx", "logit_xy")
    )
    spread = n * xx - x * x
    slope = (n * xy - x * y) / spread if n >= _LEAST_TOKENS and spread > 0 else 0
    return f" of about {1 / slope:.2f}" if slope > 0 else ""


def _calibration(table: Table, figure: str) -> tuple[float, float]:
    """Return the mean of a ratio of probabilities and its standard error.

    The mean of p / q over tokens drawn from q is 1, whatever p is.
    """
    tokens = table["tokens"]
    mean = table[figure].sum() / tokens.sum()
    residual = table[figure] - mean * tokens
    error = math.sqrt((residual**2).sum()) / tokens.sum()
    return float(mean), float(error)


def _level(table: Table, floor: float, causes: list[Cause]) -> Cause:
    """Return what the size of the difference says, if nothing else explains it."""
    mean = _mean(table)
    where = (
        " of the other completions" if any(c.name in ("stale", "sequences") for c in causes) else ""
    )
    if mean == 0:
        text = (
            f"all {int(table['tokens'].sum())} compared log-probs{where} are equal to the last bit"
        )
        return Cause("equal", "note", text)
    bias = _mean(table, "d")
    early, late = (
        np.nanmean([table["early"], table["late"]], axis=1)
        if (~np.isnan(table["early"])).any()
        else (math.nan, math.nan)
    )
    size = f"mean |Δ log p|{where} {mean:.2g} nats, mean Δ {bias:+.1g}"
    drift = f"{early:.2g} in the first third of a completion, {late:.2g} in the last"
    if mean <= floor:
        return Cause(
            name="rounding",
            level="note",
            evidence=f"{size}: at most the floor of {floor:g}, the size of other kernels' rounding",
        )
    measured = ~np.isnan(table["early"])
    if _differ(table["early"][measured], table["late"][measured], 3.0):
        return Cause(
            name="position",
            level="fault",
            evidence=f"{size}, growing along completions: {drift}",
            remedy=(
                "compare what positions and cache go through: rope_theta and rope scaling on both"
                " sides, a quantized KV cache (kv_cache_dtype), a sliding window"
            ),
        )
    return Cause(
        name="scheme",
        level="fault",
        evidence=(
            f"{size}: above the floor of {floor:g}, along the whole completion ({drift}), in both"
            f" directions ({_sided(table):.0%} below 0): weights or activations quantized on one"
            " side, or another version of the weights"
        ),
        remedy=f"{remedy('scheme')}; where this model's own rounding is so large, give --floor",
    )
