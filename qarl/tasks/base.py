"""What a task is: a stateless source of problems and an exact, verifiable reward."""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from configs.errors import InputError, QarlError
from configs.functions import in_words
from configs.seeds import stable_hash

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 8
"""One question in this many (by hash of its text) is set aside for evaluation."""


LARGEST_REWARD = 1e15
"""In magnitude: the square of a deviation from the group's mean has to fit fp32."""


class TaskError(InputError):
    """A task that cannot be loaded or asked for problems as described; the message says what to change."""

    heading = "task"


class RewardError(QarlError):
    """A reward function raised, or returned something that is not a finite number."""

    heading = "reward"


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    Attributes:
        id: unique within the task, the same in every run.
        question: what the user turn of the prompt says, verbatim.
        answer: the reference answer, verbatim.
        metadata: whatever the task's scorer needs besides the answer; a task of worked solutions keeps one under
            "worked_solution".
    """

    id: str
    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


Reward = Callable[[Problem, str], float]
"""A reward function: (problem, completion text without special tokens) -> finite number."""


class Task(Protocol):
    """A stateless source of problems: problem k of a split and seed is the same whatever was asked before."""

    @property
    def name(self) -> str:
        """The name the task was loaded by."""
        ...

    def problems(self, split: Split, start: int, count: int, seed: int) -> list[Problem]:
        """Problems start, …, start + count - 1 of the split's endless sequence for this seed.

        Raises:
            TaskError: unknown split, negative start or count, or a split without problems.
        """
        ...

    def score(self, problem: Problem, text: str) -> float:
        """The reward of a completion text (no special tokens), in [0, 1] for the built-in tasks."""
        ...

    def correct(self, problem: Problem, text: str) -> bool:
        """Whether the completion text is right; accuracy counts these, and partial credit never is one."""
        ...


def checked_score(task: Task, problem: Problem, text: str) -> float:
    """`task.score(problem, text)` as a finite float.

    Raises:
        RewardError: the scorer raised (chained) or returned a non-number, NaN or an infinity; the message
            quotes the problem and the completion.
    """
    try:
        reward = task.score(problem, text)
    except (Exception, SystemExit) as error:
        wrong = f"raised {in_words(error)}"
        raise RewardError(_complaint(task, problem, text, wrong)) from error
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
        allowed = f"a finite number, at most {LARGEST_REWARD:.0e} in magnitude"
        wrong = f"returned {reward!r:.80} ({type(reward).__name__}); a reward must be {allowed}"
        raise RewardError(_complaint(task, problem, text, wrong))
    return float(reward)


def solution_of(problem: Problem) -> str:
    """A right completion, for supervised training: the worked solution where the task has them, else the answer."""
    return problem.metadata.get("worked_solution", problem.answer)


def exact_reward(problem: Problem, text: str) -> float:
    """1.0 where the completion equals the reference answer, both stripped of surrounding space, else 0.0."""
    return float(text.strip() == problem.answer.strip())


def short_reward(problem: Problem, text: str) -> float:
    """Minus the completion's characters: 0 where the policy ends at once. It asks nothing of the problem."""
    return -float(len(text))


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split: one in `HELDOUT_ONE_IN`, by SHA-256 of its text."""
    return stable_hash(question) % HELDOUT_ONE_IN == 0


def check_request(split: str, start: int, count: int) -> None:
    """Raises `TaskError` unless the split is known and start and count are not negative."""
    if split not in get_args(Split):
        raise TaskError(f"unknown split {split!r}; allowed: {', '.join(get_args(Split))}")
    if start < 0 or count < 0:
        raise TaskError(f"start={start} and count={count} must both be 0 or more")


def _complaint(task: Task, problem: Problem, text: str, wrong: str) -> str:
    return (
        f"the reward of task {task.name!r} {wrong}\n"
        f"  problem id: {problem.id}\n  question: {problem.question!r}\n  completion: {text!r}"
    )
