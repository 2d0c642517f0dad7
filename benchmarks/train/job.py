"""Job of TRL's process in `python -m benchmarks train`, and the answer of every trainer.

This module imports nothing heavy.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrlJob:
    """Task of TRL's process."""

    model: str
    """Model folder."""
    problems: str
    """File that `write_problems` wrote."""
    reward: str
    """Reward, as in `task.reward`."""
    setting: str
    """Name in `benchmarks.learner.trl_worker.SETTINGS`."""
    steps: int
    prompts: int
    """Prompts per step."""
    samples: int
    """Completions per prompt."""
    updates: int
    """Optimizer steps per step."""
    max_new_tokens: int
    micro_batch_tokens: int
    """Padded tokens per forward."""
    every: int
    """Steps between evaluations."""
    lr: float
    seed: int

    def as_argument(self) -> str:
        """Return the job as an argument of the worker's command line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    step: int
    samples: int
    """Completions trained on so far."""
    seconds: float
    """Seconds of the training since the first step began, without evaluations."""
    cpu_seconds: float
    """CPU seconds of all the process's threads in that time."""
    accuracy: float
    """Held-out accuracy of greedy answers, in [0, 1]."""


@dataclass(frozen=True)
class Curve:
    """Curve of one training."""

    startup: float
    """Seconds from the process's start to the beginning of the first step.

    They include the evaluation before it.
    """
    points: tuple[Point, ...]
    """The evaluation before the first step, and then all others."""
    answers: tuple[tuple[str, ...], ...] = ()
    """Answers of every evaluation, if the trainer's process cannot judge them.

    The accuracies of its points are then NaN.
    """

    @staticmethod
    def parse(data: dict[str, Any]) -> "Curve":
        """Build a curve from a worker's answer."""
        points = tuple(Point(**point) for point in data["points"])
        return Curve(data["startup"], points, tuple(map(tuple, data["answers"])))


def reached(points: Sequence[Point], accuracy: float) -> Point | None:
    """Return the point at which a training first reached an accuracy, or None.

    It lies on the straight line between the first evaluation that is not below the accuracy and the
    evaluation before it.
    """
    for before, after in zip([None, *points], points, strict=False):
        if after.accuracy < accuracy:
            continue
        if before is None:
            return after
        share = (accuracy - before.accuracy) / (after.accuracy - before.accuracy)

        def between(
            name: str, start: Point = before, end: Point = after, share: float = share
        ) -> float:
            return getattr(start, name) + share * (getattr(end, name) - getattr(start, name))

        return Point(
            step=round(between("step")),
            samples=round(between("samples")),
            seconds=between("seconds"),
            cpu_seconds=between("cpu_seconds"),
            accuracy=accuracy,
        )
    return None


def write_problems(file: Path, train: Sequence[object], heldout: Sequence[object]) -> None:
    """Write problems (`qarl.tasks.Problem`) as JSON.

    The file holds those of all steps in order, and the held-out ones.
    """
    splits = {"train": train, "heldout": heldout}
    rows = {name: [vars(problem) for problem in split] for name, split in splits.items()}
    file.write_text(json.dumps(rows))
