"""A report's first lines: what became of the runs, in words, and what asks for attention.

Compared are a run's first and last tenths of steps. A difference is called one where it is beyond
twice its standard error; thresholds are named below, and docs/guide/report.md says which they are.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from qarl.advice.finding import Finding, Level
from qarl.page.runs import Configuration, RecordedRun
from qarl.report.early_warning import early_warnings

Remark = tuple[Level, str]

APART = 0.05
"""Nats, mean |Δ log p|: where a usual token's ratio is 5 % off before anything was learned."""
PHANTOM, CORRECTED = 0.01, 0.05
TRUNCATED = 0.1
ERRORS = 0.02
TEACHING = 0.1


def verdict(kinds: Sequence[Configuration]) -> list[Finding]:
    """The headline of each configuration, then what is remarkable, warnings first."""
    single = len(kinds) == 1
    headlines = [_headline(kind, "" if single else kind.label) for kind in kinds]
    checks = (_of_early_warnings, _of_bounds, _of_learning)
    remarks = [
        Finding(level, "" if single else kind.label, text)
        for kind in kinds
        for check in checks
        for level, text in check(kind.runs)
    ]
    return headlines + sorted(
        remarks, key=lambda remark: ("warning", "note", "good").index(remark.level)
    )


def _headline(kind: Configuration, of: str) -> Finding:
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
            of,
            f"Learned nothing in {steps}{seeds}: the rewards of every group were equal, so nothing"
            " was published. Look at the completions below for what the reward was given.",
        )
    level, outcome = _outcome(runs)
    return Finding(level, of, f"{outcome} in {steps}{seeds}. {_together(runs)}".rstrip())


def _outcome(runs: Sequence[RecordedRun]) -> tuple[Level, str]:
    """By held-out accuracy where it was measured twice, and is what the policies are judged by;
    else by reward.
    """
    measured = [list(run.heldout().values()) for run in runs]
    if all(len(of_run) > 1 and of_run[-1].reward is None for of_run in measured):
        before, after = (
            sum(of_run[place].accuracy for of_run in measured) / len(runs) for place in (0, -1)
        )
        problems = sum(
            (run.deployed and run.deployed.problems) or run.config.eval.problems for run in runs
        )
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / max(problems, 1))
        words = f"held-out accuracy from {before:.1%} to {after:.1%}"
        moved = _moved(before, after, error, words, f"{100 * (after - before):+.1f} points")
        rewarded = _by_reward(runs)
        if moved[0] == "note" and rewarded[0] == "good":
            return (
                "good",
                f"{rewarded[1]}, with no change of {words}, which counts what --task.correct says,",
            )
        return moved
    return _by_reward(runs)


def _by_reward(runs: Sequence[RecordedRun]) -> Remark:
    firsts, lasts = ([m["reward"] for run in runs for m in part(run)] for part in (_first, _last))
    before, after = (sum(part) / len(part) for part in (firsts, lasts))
    error = math.sqrt(_noise(runs) * sum(1 / len(part) for part in (firsts, lasts)))
    return _moved(
        before,
        after,
        error,
        f"reward from {before:.3g} to {after:.3g}",
        f"{after - before:+.3g}",
    )


def _moved(
    before: float, after: float, error: float, words: str, difference: str
) -> tuple[Level, str]:
    if abs(after - before) <= 2 * error:
        return "note", f"No change beyond noise: {words} ({difference})"
    return (
        ("good", f"Learned: {words} ({difference})")
        if after > before
        else ("warning", f"Got worse: {words}")
    )


def _together(runs: Sequence[RecordedRun]) -> str:
    apart = _mean_last(runs, "learn/mismatch/mean_abs")
    if apart is None:
        return ""
    words = f"{_nats(apart)} a token apart" if apart else "equal to the last bit"
    return f"Learner and sampler are {words} at the end."


def _of_early_warnings(runs: Sequence[RecordedRun]) -> Iterator[Remark]:
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        for warning in early_warnings(run.metrics):
            yield "warning", f"At step {warning.step}{of}: {warning.text}."


def _of_bounds(runs: Sequence[RecordedRun]) -> Iterator[Remark]:
    apart = _mean_last(runs, "learn/mismatch/mean_abs")
    if apart is not None and apart > APART:
        words = (
            f"Mean |Δ log p| is {_nats(apart)} at the end, above {APART}: sampler and learner are"
            " two policies."
        )
        yield "warning", words
    for field, bound, what in (
        (
            "learn/phantom_clipped",
            PHANTOM,
            "of tokens are clipped at the end for precision alone",
        ),
        (
            "learn/corrected",
            CORRECTED,
            "of tokens have a mismatch weight that was capped or masked at the end",
        ),
        (
            "truncated",
            TRUNCATED,
            "of completions are cut off by rollout.max_new_tokens at the end",
        ),
        ("error_tokens", ERRORS, "of tokens are improbable or in loops at the end"),
    ):
        share = _mean_last(runs, field)
        if share is not None and share > bound:
            yield "warning", f"{share:.1%} {what} (above {bound:.0%})."


def _of_learning(runs: Sequence[RecordedRun]) -> Iterator[Remark]:
    teaching = _mean_last(runs, "mixed_reward_groups")
    if teaching is not None and teaching < TEACHING:
        why = "the task is nearly solved, or out of reach"
        yield (
            "note",
            f"Only {teaching:.1%} of groups have rewards that differ at the end: {why}.",
        )
    skipped = sum(m.get("learn/skipped", 0) for run in runs for m in run.metrics)
    if skipped:
        steps = _counted(skipped, "optimizer step was", "optimizer steps were")
        yield "warning", f"{steps} left out because a gradient was not finite."
    idle = sum(run.metrics[-1]["skipped_batches"] for run in runs)
    if idle:
        yield (
            "note",
            (
                f"{_counted(idle, 'batch', 'batches')} taught nothing: within every group all"
                " rewards were equal."
            ),
        )


def _nats(value: float) -> str:
    return f"{value:.2g} nats" if value >= 0.001 else f"{value:.1e} nats"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _first(run: RecordedRun) -> list[dict]:
    return run.metrics[: -(-len(run.metrics) // 10)]


def _last(run: RecordedRun) -> list[dict]:
    return run.metrics[-len(_first(run)) :]


def _mean_last(runs: Sequence[RecordedRun], field: str) -> float | None:
    values = [m[field] for run in runs for m in _last(run) if m.get(field) is not None]
    return sum(values) / len(values) if values else None


def _noise(runs: Sequence[RecordedRun]) -> float:
    """Variance of a step's reward, as consecutive steps show it: a short run's tenths are too few
    steps for that.
    """
    pairs = [pair for run in runs for pair in pairwise(m["reward"] for m in run.metrics)]
    return sum((after - before) ** 2 for before, after in pairs) / max(2 * len(pairs), 1)
