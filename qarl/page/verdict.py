"""The first lines of a report: the outcome of the runs in words, and what needs attention.

The first tenth of a run's steps is compared with the last. A difference counts if it is larger than
twice its standard error. The thresholds are below, and docs/guide/report.md explains them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from qarl.page.runs import Configuration, RecordedRun
from qarl.report.early_warning import early_warnings
from qarl.report.finding import Finding

MAX_MISMATCH = 0.05
"""Mean |Δ log p|, in nats, above which there is a warning.

The ratio of a usual token is then 5 % off before anything was learned.
"""

MAX_PHANTOM_CLIPPED = 0.01
"""Fraction of tokens clipped for precision alone, above which there is a warning."""

MAX_CORRECTED = 0.05
"""Fraction of tokens whose mismatch weight was cut, above which there is a warning."""

MAX_TRUNCATED = 0.1
"""Fraction of truncated completions, above which there is a warning."""

MAX_ERROR_TOKENS = 0.02
"""Fraction of error tokens, above which there is a warning."""

MIN_MIXED_GROUPS = 0.1
"""Fraction of groups with rewards that differ, below which there is a note."""


def verdict(kinds: Sequence[Configuration]) -> list[Finding]:
    """Return the headline of each configuration, then all remarks, warnings first."""
    single = len(kinds) == 1
    headlines = [_headline(kind, "" if single else kind.label) for kind in kinds]
    remarks = []
    for kind in kinds:
        about = "" if single else kind.label
        for check in (_early_warnings, _exceeded_bounds, _learning_remarks):
            remarks += [replace(finding, about=about) for finding in check(kind.runs)]
    order = ("warning", "note", "good")
    return headlines + sorted(remarks, key=lambda remark: order.index(remark.level))


def _headline(kind: Configuration, about: str) -> Finding:
    """Return the outcome of a configuration's runs. about: the finding's subject."""
    runs = kind.runs
    done = [run.metrics[-1]["step"] for run in runs]
    seeds = f" over {len(runs)} seeds" if len(runs) > 1 else ""
    steps = _counted(max(done), "step", "steps")
    if min(done) < max(done):
        steps = f"{min(done):,} to {steps}"
    unfinished = sum(not run.finished for run in runs)
    if unfinished and len(runs) > 1:
        seeds += f" ({unfinished} of them not finished)"
    elif unfinished:
        steps += f" of {min(run.config.steps for run in runs):,}; the run is not finished"
    if all(run.metrics[-1]["weight_version"] == 0 for run in runs):
        return Finding(
            "warning",
            about,
            f"Learned nothing in {steps}{seeds}: the rewards of every group were equal, so nothing"
            " was published. Look at the completions below for what the reward was given.",
        )
    outcome = _outcome(runs)
    text = f"{outcome.text} in {steps}{seeds}. {_mismatch(runs)}".rstrip()
    return Finding(outcome.level, about, text)


def _outcome(runs: Sequence[RecordedRun]) -> Finding:
    """Return whether the runs learned, by held-out accuracy or by reward.

    Accuracy counts if it was measured at least twice in every run, and no held-out reward was.
    """
    measured = [list(run.heldout().values()) for run in runs]
    by_reward = _reward_outcome(runs)
    if not all(len(results) > 1 and results[-1].reward is None for results in measured):
        return by_reward
    before = sum(results[0].accuracy for results in measured) / len(runs)
    after = sum(results[-1].accuracy for results in measured) / len(runs)
    problems = sum(
        (run.deployed and run.deployed.problems) or run.config.eval.problems for run in runs
    )
    # Standard error of the difference of two binomial fractions.
    variance = before * (1 - before) + after * (1 - after)
    error = math.sqrt(variance / max(problems, 1))
    words = f"held-out accuracy from {before:.1%} to {after:.1%}"
    by_accuracy = _change(before, after, error, words, f"{100 * (after - before):+.1f} points")
    if by_accuracy.level == "note" and by_reward.level == "good":
        text = (
            f"{by_reward.text}, with no change of {words}, which counts what --task.correct says,"
        )
        return Finding("good", "", text)
    return by_accuracy


def _reward_outcome(runs: Sequence[RecordedRun]) -> Finding:
    """Return whether the runs learned, by the reward of their first and last steps."""
    firsts = [m["reward"] for run in runs for m in _first(run)]
    lasts = [m["reward"] for run in runs for m in _last(run)]
    before = sum(firsts) / len(firsts)
    after = sum(lasts) / len(lasts)
    # the variance of a difference of two means, over a step's variance
    factor = 1 / len(firsts) + 1 / len(lasts)
    error = math.sqrt(_noise(runs) * factor)
    words = f"reward from {before:.3g} to {after:.3g}"
    return _change(before, after, error, words, f"{after - before:+.3g}")


def _change(
    before: float,
    after: float,
    error: float,
    words: str,
    difference: str,
) -> Finding:
    """Return in words whether a value changed by more than two standard errors."""
    if abs(after - before) <= 2 * error:
        return Finding("note", "", f"No change beyond noise: {words} ({difference})")
    if after > before:
        return Finding("good", "", f"Learned: {words} ({difference})")
    return Finding("warning", "", f"Got worse: {words}")


def _mismatch(runs: Sequence[RecordedRun]) -> str:
    """Return how far learner and sampler are apart at the end, or "" if nothing was learned."""
    mean_abs = _mean_last(runs, "learn/mismatch/mean_abs")
    if mean_abs is None:
        return ""
    words = f"{_nats(mean_abs)} a token apart" if mean_abs else "equal to the last bit"
    return f"Learner and sampler are {words} at the end."


def _early_warnings(runs: Sequence[RecordedRun]) -> Iterator[Finding]:
    """Yield the early warnings of all runs."""
    for run in runs:
        name = f" of {run.name}" if len(runs) > 1 else ""
        for warning in early_warnings(run.metrics):
            yield Finding("warning", "", f"At step {warning.step}{name}: {warning.text}.")


def _exceeded_bounds(runs: Sequence[RecordedRun]) -> Iterator[Finding]:
    """Yield a warning for each metric that is beyond its threshold at the end."""
    mean_abs = _mean_last(runs, "learn/mismatch/mean_abs")
    if mean_abs is not None and mean_abs > MAX_MISMATCH:
        words = (
            f"Mean |Δ log p| is {_nats(mean_abs)} at the end, above {MAX_MISMATCH}: sampler and"
            " learner are two policies."
        )
        yield Finding("warning", "", words)
    for field, bound, text in (
        (
            "learn/phantom_clipped",
            MAX_PHANTOM_CLIPPED,
            "of tokens are clipped at the end for precision alone",
        ),
        (
            "learn/corrected",
            MAX_CORRECTED,
            "of tokens have a mismatch weight that was capped or masked at the end",
        ),
        (
            "truncated",
            MAX_TRUNCATED,
            "of completions are cut off by rollout.max_new_tokens at the end",
        ),
        ("error_tokens", MAX_ERROR_TOKENS, "of tokens are improbable or in loops at the end"),
    ):
        share = _mean_last(runs, field)
        if share is not None and share > bound:
            yield Finding("warning", "", f"{share:.1%} {text} (above {bound:.0%}).")


def _learning_remarks(runs: Sequence[RecordedRun]) -> Iterator[Finding]:
    """Yield remarks on steps and groups that taught nothing."""
    teaching = _mean_last(runs, "mixed_reward_groups")
    if teaching is not None and teaching < MIN_MIXED_GROUPS:
        text = (
            f"Only {teaching:.1%} of groups have rewards that differ at the end: the task is nearly"
            " solved, or out of reach."
        )
        yield Finding("note", "", text)
    skipped = sum(m.get("learn/skipped", 0) for run in runs for m in run.metrics)
    if skipped:
        steps = _counted(skipped, "optimizer step was", "optimizer steps were")
        text = f"{steps} left out because a gradient was not finite."
        yield Finding("warning", "", text)
    idle = sum(run.metrics[-1]["skipped_batches"] for run in runs)
    if idle:
        text = (
            f"{_counted(idle, 'batch', 'batches')} taught nothing: within every group all rewards"
            " were equal."
        )
        yield Finding("note", "", text)


def _nats(value: float) -> str:
    return f"{value:.2g} nats" if value >= 0.001 else f"{value:.1e} nats"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _first(run: RecordedRun) -> list[dict]:
    """Return the first tenth of a run's steps, rounded up."""
    return run.metrics[: -(-len(run.metrics) // 10)]


def _last(run: RecordedRun) -> list[dict]:
    """Return the last tenth of a run's steps, rounded up."""
    return run.metrics[-len(_first(run)) :]


def _mean_last(runs: Sequence[RecordedRun], field: str) -> float | None:
    """Return a metric's mean over the last tenths of runs; None if it was not measured there."""
    steps = [step for run in runs for step in _last(run)]
    values = [step[field] for step in steps if step.get(field) is not None]
    return sum(values) / len(values) if values else None


def _noise(runs: Sequence[RecordedRun]) -> float:
    """Return the variance of a step's reward, estimated from consecutive steps.

    The tenths of a short run have too few steps to estimate it from. Half of the mean square of
    differences is the variance, because a difference has two steps' noise.
    """
    pairs = [pair for run in runs for pair in pairwise(m["reward"] for m in run.metrics)]
    squares = [(after - before) ** 2 for before, after in pairs]
    return sum(squares) / max(2 * len(pairs), 1)
