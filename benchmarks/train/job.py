"""What `python -m benchmarks train` asks of TRL's process and what trainers answer. Imports nothing
heavy.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrlJob:
    """model: folder. problems: file that `write_problems` wrote. reward: as in `task.reward`.
    setting: of `benchmarks.learner.trl_worker.SETTINGS`. prompts: a step. samples: completions a
    prompt. updates: optimizer steps a step. every: steps between evaluations. micro_batch_tokens:
    padded tokens a forward.
    """

    model: str
    problems: str
    reward: str
    setting: str
    steps: int
    prompts: int
    samples: int
    updates: int
    max_new_tokens: int
    micro_batch_tokens: int
    every: int
    lr: float
    seed: int

    def as_argument(self) -> str:
        """For the worker's command line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Point:
    """One evaluation. seconds, cpu_seconds: of the training so far, from the first step's begin,
    evaluations left out; cpu_seconds are those of all the process's threads. samples: completions
    trained on so far. accuracy: held-out, greedy, in [0, 1].
    """

    step: int
    samples: int
    seconds: float
    cpu_seconds: float
    accuracy: float


@dataclass(frozen=True)
class Curve:
    """One training. startup: seconds from the process's start to the first step's begin, with the
    evaluation before it. points: that one's, and then as evaluated. answers: of every evaluation,
    where the trainer's process could not judge them; its points' accuracies are NaN then.
    """

    startup: float
    points: tuple[Point, ...]
    answers: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def parse(data: dict[str, Any]) -> "Curve":
        """From a worker's answer."""
        points = tuple(Point(**point) for point in data["points"])
        return Curve(data["startup"], points, tuple(map(tuple, data["answers"])))


def reached(points: Sequence[Point], accuracy: float) -> Point | None:
    """Where a training first reached an accuracy: at the first evaluation that is not below it, and
    of the way there from the evaluation before, what that accuracy is on the straight line between
    the two. None where none is.
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
    """Problems (`qarl.tasks.Problem`) as JSON: those of all steps in order, and those held out."""
    splits = {"train": train, "heldout": heldout}
    file.write_text(
        json.dumps({name: [vars(problem) for problem in split] for name, split in splits.items()})
    )
