"""The metrics of a step, and their writer: JSON lines, TensorBoard, and the tracker `log` names."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from qarl.configs.errors import disk_error
from qarl.configs.files import written_aside
from qarl.evaluation.heldout import Heldout
from qarl.learner.learn_stats import LearnStats
from qarl.quant.runtime.replaced import replaced
from qarl.report.error_tokens import count_error_tokens
from qarl.report.loggers import SendMetrics
from qarl.report.run_folder import RunFolder, read_metrics
from qarl.rollout.types import Completion, Group
from qarl.tasks.base import WeightedSum


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one training step.

    Two equal runs differ in `seconds` alone.
    """

    step: int
    """Number of the step, from 1."""

    weight_version: int
    """Version of the weights in the engine after the step."""

    prompts: int
    """Number of sampled prompts, each of which gives a group of completions."""

    unscored: int
    """Number of completions left out because the reward gave no signal for them."""

    reward: float
    """Mean reward of all completions."""

    reward_deviation: float
    """Standard deviation of the rewards within a group, mean over groups."""

    rewards: dict[str, dict[str, float]] | None
    """Mean and deviation of each reward by its name; None unless several are added up."""

    response_tokens: float
    """Mean number of sampled tokens of a completion."""

    truncated: float
    """Fraction of completions that were cut off by a limit of their length."""

    mixed_reward_groups: float
    """Fraction of groups whose rewards differ; the others teach nothing."""

    error_tokens: float
    """Fraction of response tokens that are error tokens (`qarl.report.error_tokens`)."""

    improbable_tokens: float
    """Fraction of response tokens that the sampler gave a very small probability."""

    repeated_tokens: float
    """Fraction of response tokens that are part of a loop."""

    error_tokens_negative: float | None
    """Fraction of error tokens in completions of negative advantage; None if there are none."""

    error_tokens_positive: float | None
    """Fraction of error tokens in completions of positive advantage; None if there are none."""

    conversation: dict[str, float] | None
    """Mean number of events of a conversation by name (`Completion.events`).

    None if prompts are answered once.
    """

    skipped_batches: int
    """Number of batches so far from which nothing was learned, such as those of equal rewards."""

    learn: LearnStats | None
    """The learner's metrics; None if all rewards of each group were equal."""

    heldout: Heldout | None
    """Held-out figures, `accuracy` and `heldout_reward`; None if this step was not evaluated."""

    digest: str | None
    """Digest of the published weights; None if nothing was published."""

    canary: float | None
    """Mean |Δ log p| of the publish's canary, in nats; None if it had no canary."""

    staleness: float | None
    """Versions between the weights that sampled and those that learn, mean over tokens.

    None if the run does not sample ahead.
    """

    seconds: dict[str, float]
    """Wall time by phase, in seconds."""

    def flat(self) -> dict[str, Any]:
        """Return all metrics by one name each, nested fields joined with "/".

        None is left out, except in nested fields: the learner's are null if a step did not measure
        them. The learner's seconds are under seconds/learn/. Its diagnostics' records are next to
        its other metrics.
        """
        fields = dataclasses.asdict(replace(self, heldout=None))
        if self.heldout is not None:
            fields["accuracy"] = self.heldout.accuracy
            fields["heldout_reward"] = self.heldout.reward
        return {_public_name(name): value for name, value in _flatten("", fields)}


def _public_name(name: str) -> str:
    renamed = name.replace("learn/seconds/", "seconds/learn/")
    return renamed.replace("learn/records/", "learn/")


def batch_metrics(groups: list[Group]) -> dict[str, Any]:
    """Return the fields of `StepMetrics` that a step's groups determine, by name."""
    rewards = [r for g in groups for r in g.rewards]
    completions = [c for g in groups for c in g.completions]
    return {
        "prompts": len(groups),
        "unscored": sum(g.unscored for g in groups),
        "reward": sum(rewards) / len(rewards),
        "reward_deviation": fmean(pstdev(g.rewards) for g in groups if g.rewards),
        "rewards": _term_statistics(rewards),
        "response_tokens": sum(sum(c.sampled) for c in completions) / len(completions),
        "truncated": sum(c.truncated for c in completions) / len(completions),
        "mixed_reward_groups": sum(len(set(g.rewards)) > 1 for g in groups) / len(groups),
        "conversation": _mean_events(completions),
        **count_error_tokens(groups),
    }


def _term_statistics(rewards: list[float]) -> dict[str, dict[str, float]] | None:
    """Return mean and deviation of each term of rewards that are weighted sums, or None."""
    sums = [reward for reward in rewards if isinstance(reward, WeightedSum)]
    names = sums[0].terms if sums else ()
    statistics = {}
    for name in names:
        terms = [reward.terms[name] for reward in sums]
        # A term may be missing for a completion that its reward gave no signal for.
        values = [term for term in terms if term is not None]
        if values:
            statistics[name] = {"mean": fmean(values), "deviation": pstdev(values)}
    return statistics or None


def _mean_events(completions: list[Completion]) -> dict[str, float] | None:
    """Return the mean number of each event in a completion, or None if there are no events."""
    counts = [dict(c.events) for c in completions]
    names = sorted({name for count in counts for name in count})
    totals = {name: sum(count.get(name, 0) for count in counts) for name in names}
    means = {name: total / len(counts) for name, total in totals.items()}
    return means or None


WriteMetrics = Callable[[StepMetrics], None]
"""Writes the metrics of one step, in all processes; only the first has files."""


@contextmanager
def metrics_writer(
    folder: RunFolder, resume_step: int | None, first: bool, send: SendMetrics
) -> Iterator[WriteMetrics]:
    """Open the files of a run's metrics, and yield a function that writes one step to all of them.

    A step goes to metrics.jsonl, TensorBoard and `send`. All of them are closed at the end, also
    when the run fails.

    Args:
        folder: folder of the run.
        resume_step: step from which the run goes on; lines of later steps are dropped. None for a
            new run.
        first: whether this is the first process; the others write nothing.
        send: sends the figures to an experiment tracker.
    """
    if not first:
        yield lambda metrics: None
        return
    from torch.utils.tensorboard import SummaryWriter

    if resume_step is not None and folder.metrics.exists():
        _drop_after(folder.metrics, resume_step)
    purge_step = None if resume_step is None else resume_step + 1
    with (
        folder.metrics.open("a", encoding="utf-8") as lines,
        replaced(threading, excepthook=partial(_show_unless_disk, threading.excepthook)),
        SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge_step) as board,
    ):

        def write(metrics: StepMetrics) -> None:
            flat = metrics.flat()
            lines.write(json.dumps(flat) + "\n")
            lines.flush()
            figures = {
                name: value
                for name, value in flat.items()
                if isinstance(value, int | float) and name != "step"
            }
            for name, value in figures.items():
                board.add_scalar(name, value, metrics.step)
            send(figures, metrics.step)

        yield write


def _show_unless_disk(
    show: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """Show a thread's exception unless the disk caused it.

    TensorBoard's thread raises a disk error again at the next write, which reports it.
    """
    if failed.exc_value is None or disk_error(failed.exc_value) is None:
        show(failed)


def _drop_after(file: Path, step: int) -> None:
    """Remove the lines of steps after `step`."""
    # The old file stays if a full disk or a kill interrupts the write.
    with written_aside(file) as building:
        lines = [json.dumps(line) + "\n" for line in read_metrics(file, step)]
        building.write_text("".join(lines), encoding="utf-8")


def _flatten(
    prefix: str,
    tree: dict[str, Any],
) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree with the path to it; None at the top level is left out."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(name + "/", value)
        elif value is not None or prefix:
            yield name, value
