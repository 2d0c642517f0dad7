"""What tasks are made of: problems, responses to them, and where problems come from."""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from qarl.configs.errors import InputError, QarlError
from qarl.configs.seeds import stable_hash

Split = Literal["train", "heldout"]
Message = dict[str, str]
"""One turn of a chat: {"role": "system", "user" or "assistant", "content": text}."""

HELDOUT_ONE_IN = 8
"""One question in this many (by hash of its text) is set aside for evaluation."""


class TaskError(InputError, heading="task"):
    """A task that cannot be loaded or asked for problems as described; the message says what to
    change.
    """


class RewardError(QarlError, heading="reward"):
    """A reward or checker raised, ended its process, took too long, or returned what is none."""


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    Attributes:
        id: unique within the task, the same in every run. question: what the last user turn of the
        prompt says, verbatim. answer: the reference answer, verbatim. metadata: whatever the task's
        scorer needs besides the answer: of a file, the other columns; a task of worked
            solutions keeps one under "worked_solution".
        messages: the whole conversation up to the answer, ending with a user turn; () where it is
        the question alone.
    """

    id: str
    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()

    @property
    def chat(self) -> list[Message]:
        """The conversation as a chat template takes it."""
        return list(self.messages) or [{"role": "user", "content": self.question}]

    def behind(self, system: str) -> "Problem":
        """With a system prompt before the conversation."""
        return dataclasses.replace(
            self, messages=({"role": "system", "content": system}, *self.chat)
        )


@dataclass(frozen=True)
class Response:
    """A completion to be judged. text: without special tokens. token_ids: as sampled, () where
    nothing was. reward: what a rollout or an environment gave already.
    """

    problem: Problem
    text: str
    token_ids: tuple[int, ...] = ()
    reward: float | None = None


@dataclass(frozen=True)
class Failure:
    """Why a function gave no outcome for a response, in words."""

    words: str


class WeightedSum(float):
    """Of several rewards of one response. terms: each reward by its name, None where it gave no
    signal.
    """

    terms: dict[str, float | None]

    def __new__(cls, value: float, terms: dict[str, float | None]) -> "WeightedSum":
        """See the class."""
        total = super().__new__(cls, value)
        total.terms = terms
        return total

    def __getnewargs__(self) -> tuple[float, dict[str, float | None]]:  # type: ignore[override]
        """For pickle, by which groups go to other processes."""
        return float(self), self.terms


LARGEST_REWARD = 1e15
"""In magnitude: the square of a deviation from the group's mean has to fit fp32."""


def as_reward(outcome: Any) -> float | None:
    """What a reward, a rollout or an environment returned, as a number; None is no signal. Raises
    `ValueError` for a `Failure` and anything else, in words that follow whose reward it is.
    """
    if isinstance(outcome, Failure):
        raise ValueError(outcome.words)
    if outcome is None:
        return None
    size: Any = abs(outcome) if isinstance(outcome, numbers.Real) else None
    if size is None or not size <= LARGEST_REWARD:  # NaN is not
        allowed = (
            f"a finite number, at most {LARGEST_REWARD:.0e} in magnitude, or None for no signal"
        )
        raise ValueError(
            f"returned {outcome!r:.80} ({type(outcome).__name__}); a reward must be {allowed}"
        )
    return outcome if isinstance(outcome, WeightedSum) else float(outcome)


def as_verdict(outcome: Any) -> bool:
    """What a checker returned, as a truth. Raises as `as_reward`."""
    if isinstance(outcome, Failure):
        raise ValueError(outcome.words)
    if outcome not in (True, False):  # 1.0 and 0.0 too
        kind = type(outcome).__name__
        raise ValueError(
            f"returned {outcome!r:.80} ({kind}); a verdict must be true or false, or 1 or 0"
        )
    return bool(outcome)


Scorer = Callable[[Sequence[Response]], list[Any]]
"""Responses → an outcome each: a number (None: no signal), or for a checker a verdict; a `Failure`
where there is none.
"""


class Source(Protocol):
    """A stateless source of problems: problem k of a split and seed is the same whatever was asked
    before.
    """

    @property
    def name(self) -> str:
        """The name it was loaded by."""
        ...

    def problems(self, split: Split, start: int, count: int, seed: int) -> list[Problem]:
        """Problems start, …, start + count - 1 of the split's endless sequence for this seed.

        Raises:
            TaskError: unknown split, negative start or count, or a split without problems.
        """
        ...


def solution_of(problem: Problem) -> str:
    """A right completion, for supervised training: the worked solution where the task has them,
    else the answer.
    """
    return problem.metadata.get("worked_solution", problem.answer)


def is_heldout(question: str) -> bool:
    """Whether a question belongs to the held-out split: one in `HELDOUT_ONE_IN`, by SHA-256 of its
    text.
    """
    return stable_hash(question) % HELDOUT_ONE_IN == 0


def check_request(split: str, start: int, count: int) -> None:
    """Raises `TaskError` unless the split is known and start and count are not negative."""
    if split not in get_args(Split):
        raise TaskError(f"unknown split {split!r}; allowed: {', '.join(get_args(Split))}")
    if start < 0 or count < 0:
        raise TaskError(f"start={start} and count={count} must both be 0 or more")
