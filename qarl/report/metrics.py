"""What a step reports, and where it is written: JSON lines, TensorBoard, and another by `log`."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from qarl.configs.errors import disk_error
from qarl.configs.files import written_aside
from qarl.learner.learn_stats import LearnStats
from qarl.quant.runtime.replaced import replaced
from qarl.report.error_tokens import count_error_tokens
from qarl.report.loggers import Log
from qarl.report.run_folder import RunFolder
from qarl.rollout.types import Completion, Group
from qarl.tasks.base import WeightedSum


@dataclass(frozen=True)
class StepMetrics:
    """One step. prompts: sampled; reward, response_tokens: means over all their completions.
    reward_deviation: of the rewards within a group, mean over groups. rewards: mean and deviation
    of each of several, by its name. unscored: completions left out, for which the reward gave no
    signal. mixed_reward_groups: share of groups whose rewards differ (the others teach nothing).
    error_tokens and the four that split it: `qarl.report.error_tokens`. accuracy, heldout_reward:
    held-out (`Heldout`), where evaluated. learn: None where every group's rewards were equal.
    digest: of the version that was published; canary: mean |Δ log p| of the publish's, where it had
    one, nats. conversation: what happened in conversations (`Completion.events`), means over them;
    None where prompts are answered once. staleness: versions between the weights that sampled and
    those that learn, mean over tokens; None in a run that samples none ahead. seconds: wall time by
    phase, the only fields that two equal runs differ in.
    """

    step: int
    weight_version: int
    prompts: int
    unscored: int
    reward: float
    reward_deviation: float
    rewards: dict[str, dict[str, float]] | None
    response_tokens: float
    truncated: float
    mixed_reward_groups: float
    error_tokens: float
    improbable_tokens: float
    repeated_tokens: float
    error_tokens_negative: float | None
    error_tokens_positive: float | None
    conversation: dict[str, float] | None
    skipped_batches: int
    learn: LearnStats | None
    accuracy: float | None
    heldout_reward: float | None
    digest: str | None
    canary: float | None
    staleness: float | None
    seconds: dict[str, float]

    def flat(self) -> dict[str, Any]:
        """Nested fields joined with "/"; None left out, but for the learner's, which are null where
        a step did not measure them. The learner's seconds are under seconds/learn/, its
        diagnostics' beside its other metrics.
        """
        return {
            name.replace("learn/seconds/", "seconds/learn/").replace(
                "learn/records/", "learn/"
            ): value
            for name, value in _flatten("", dataclasses.asdict(self))
        }


def batch_metrics(groups: list[Group]) -> dict[str, Any]:
    """The fields of `StepMetrics` from prompts to error tokens, of a step's groups."""
    rewards = [r for g in groups for r in g.rewards]
    completions = [c for g in groups for c in g.completions]
    return {
        "prompts": len(groups),
        "unscored": sum(g.unscored for g in groups),
        "reward": sum(rewards) / len(rewards),
        "reward_deviation": fmean(pstdev(g.rewards) for g in groups if g.rewards),
        "rewards": _of_each(rewards),
        "response_tokens": sum(sum(c.sampled) for c in completions) / len(completions),
        "truncated": sum(c.truncated for c in completions) / len(completions),
        "mixed_reward_groups": sum(len(set(g.rewards)) > 1 for g in groups) / len(groups),
        "conversation": _mean_events(completions),
        **count_error_tokens(groups),
    }


def _of_each(rewards: list[float]) -> dict[str, dict[str, float]] | None:
    sums = [reward for reward in rewards if isinstance(reward, WeightedSum)]
    columns = {
        name: [t for each in sums if (t := each.terms[name]) is not None]
        for name in (sums[0].terms if sums else ())
    }
    return {
        name: {"mean": fmean(c), "deviation": pstdev(c)} for name, c in columns.items() if c
    } or None


def _mean_events(completions: list[Completion]) -> dict[str, float] | None:
    counts = [dict(c.events) for c in completions]
    names = sorted({name for each in counts for name in each})
    return {name: sum(each.get(name, 0) for each in counts) / len(counts) for name in names} or None


@contextmanager
def metrics_writer(
    folder: RunFolder, resume_step: int | None, first: bool, log: Log
) -> Iterator[Callable[[StepMetrics], None]]:
    """Yields what appends a step to metrics.jsonl, TensorBoard and `log`; what is there of steps
    after `resume_step` is dropped first. All is closed at the end, also of a run that fails. first:
    whether this is the first process; the others write nothing.
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
        replaced(threading, excepthook=partial(_but_for_disks, threading.excepthook)),
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
            log(figures, metrics.step)

        yield write


def _but_for_disks(
    show: Callable[[threading.ExceptHookArgs], object], failed: threading.ExceptHookArgs
) -> None:
    """TensorBoard's thread keeps what a full disk raised for whoever writes next; it need not be
    shown too.
    """
    if failed.exc_value is None or disk_error(failed.exc_value) is None:
        show(failed)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in json_lines(file)]


def json_lines(file: Path) -> list[str]:
    """A file's lines. Split at "\\n" alone: JSON may hold other separators of lines (U+2028) as
    they are.
    """
    return [line for line in file.read_text(encoding="utf-8").split("\n") if line]


def read_until(file: Path, step: int) -> list[dict[str, Any]]:
    """The complete lines up to `step`, of a metrics.jsonl that need not exist; one cut short by a
    crash is none.
    """
    lines = []
    for text in json_lines(file) if file.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(text))
    return [line for line in lines if line["step"] <= step]


def _drop_after(file: Path, step: int) -> None:
    with written_aside(file) as building:  # a full disk or a kill leaves the curve
        building.write_text(
            "".join(json.dumps(line) + "\n" for line in read_until(file, step)),
            encoding="utf-8",
        )


def _flatten(prefix: str, tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(name + "/", value)
        elif value is not None or prefix:
            yield name, value
