"""Building blocks of tasks: problems, responses to them, and sources of problems."""

import dataclasses
import hashlib
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from qarl.configs.errors import InputError, QarlError
from qarl.configs.seeds import stable_hash

Split = Literal["train", "heldout"]
Message = dict[str, str]
"""One turn of a chat: {"role": "system", "user" or "assistant", "content": text}."""

HELDOUT_ONE_IN = 8
"""One question in this many, by the hash of its text, is set aside for evaluation."""


class TaskError(InputError, heading="task"):
    """A task is unusable as configured; the message says what to change."""


class RewardError(QarlError, heading="reward"):
    """A reward or checker raised, crashed, took too long, or returned an invalid outcome."""


PICTURE = "\ufffc"
"""Character that stands for a picture in a message's text, Unicode's for embedded objects."""


@dataclass(frozen=True)
class Picture:
    """One picture of a question."""

    source: Path | bytes = field(repr=False)
    """The picture's file, or its contents (PNG, JPEG, …)."""
    digest: str
    """SHA-256 of the contents."""

    @classmethod
    def of(cls, source: Path | bytes) -> "Picture":
        """Return a picture with the digest of its contents. Raises `OSError` for a missing file."""
        contents = source if isinstance(source, bytes) else source.read_bytes()
        return cls(source, hashlib.sha256(contents).hexdigest())

    def contents(self) -> bytes:
        """Return the contents of the file.

        Raises `TaskError` if it is gone, or another one than when the task was loaded.
        """
        if isinstance(self.source, bytes):
            return self.source
        try:
            contents = self.source.read_bytes()
        except OSError as error:
            raise TaskError(
                f"picture {self.source} cannot be read any more: {error.strerror or error}; put it"
                " back"
            ) from error
        if hashlib.sha256(contents).hexdigest() != self.digest:
            raise TaskError(
                f"picture {self.source} has changed since the task was loaded; put the former one"
                " back, or start again"
            )
        return contents


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer."""

    id: str
    """Id, unique within the task and the same in every run."""
    question: str
    """Content of the prompt's last user turn, verbatim."""
    answer: str
    """Reference answer, verbatim."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever the task's scorer needs besides the answer; for a file, the other columns.

    A task of worked solutions keeps one under "worked_solution".
    """
    messages: tuple[Message, ...] = ()
    """Conversation up to the answer, ending with a user turn. Empty if it is only the question.

    `PICTURE` stands for the pictures, in their order; without any they come before the last turn.
    """
    pictures: tuple[Picture, ...] = ()
    """Pictures beside the text."""

    @property
    def chat(self) -> list[Message]:
        """The conversation as a list of messages, for a chat template."""
        return list(self.messages) or [{"role": "user", "content": self.question}]

    def with_system_prompt(self, system: str) -> "Problem":
        """Return a copy that starts with this system prompt."""
        return dataclasses.replace(
            self, messages=({"role": "system", "content": system}, *self.chat)
        )


@dataclass(frozen=True)
class Response:
    """A completion that is to be judged."""

    problem: Problem
    text: str
    """Text without special tokens."""
    token_ids: tuple[int, ...] = ()
    """Sampled token ids; () if nothing was sampled."""
    reward: float | None = None
    """Reward that a rollout or an environment already gave, or None."""


@dataclass(frozen=True)
class Failure:
    """The reason why a function gave no outcome for a response."""

    words: str
    """Reason, in words that follow the function's name."""


class WeightedSum(float):
    """Weighted sum of several rewards of one response."""

    terms: dict[str, float | None]
    """Each reward by its name; None if it gave no signal."""

    def __new__(cls, value: float, terms: dict[str, float | None]) -> "WeightedSum":
        """Create the sum with its terms."""
        total = super().__new__(cls, value)
        total.terms = terms
        return total

    def __getnewargs__(self) -> tuple[float, dict[str, float | None]]:  # type: ignore[override]
        """Return the arguments from which pickle recreates the sum in other processes."""
        return float(self), self.terms


LARGEST_REWARD = 1e15
"""Largest magnitude of a reward.

The square of a deviation from the group's mean has to fit fp32.
"""


def as_reward(outcome: Any) -> float | None:
    """Return the outcome of a reward, rollout or environment as a number; None means no signal.

    Raises `ValueError` for a `Failure` and for anything else, in words that follow the reward's
    name.
    """
    if isinstance(outcome, Failure):
        raise ValueError(outcome.words)
    if outcome is None:
        return None
    size: Any = abs(outcome) if isinstance(outcome, numbers.Real) else None
    if size is None or not size <= LARGEST_REWARD:  # `not <=` is true of NaN, `>` is not
        allowed = (
            f"a finite number, at most {LARGEST_REWARD:.0e} in magnitude, or None for no signal"
        )
        raise ValueError(
            f"returned {outcome!r:.80} ({type(outcome).__name__}); a reward must be {allowed}"
        )
    return outcome if isinstance(outcome, WeightedSum) else float(outcome)


def as_verdict(outcome: Any) -> bool:
    """Return the outcome of a checker as a boolean. Raises the same errors as `as_reward`."""
    if isinstance(outcome, Failure):
        raise ValueError(outcome.words)
    if outcome not in (True, False):  # 1, 1.0, 0 and 0.0 are equal to these
        kind = type(outcome).__name__
        raise ValueError(
            f"returned {outcome!r:.80} ({kind}); a verdict must be true or false, or 1 or 0"
        )
    return bool(outcome)


Scorer = Callable[[Sequence[Response]], list[Any]]
"""Function from responses to one outcome each.

An outcome is a number (None: no signal), for a checker a verdict, or a `Failure` if there is none.
"""


class Source(Protocol):
    """A stateless source of problems.

    Problem k of a split and seed is the same whatever was asked before.
    """

    @property
    def name(self) -> str:
        """Name that the source was loaded by."""
        ...

    def problems(
        self,
        split: Split,
        start: int,
        count: int,
        seed: int,
    ) -> list[Problem]:
        """Return problems start, …, start + count - 1 of the split's endless sequence for a seed.

        Raises:
            TaskError: The split is unknown or has no problems, or start or count is negative.
        """
        ...


def solution_of(problem: Problem) -> str:
    """Return a right completion, for supervised training.

    It is the worked solution if the task has them, otherwise the answer.
    """
    return problem.metadata.get("worked_solution", problem.answer)


def is_heldout(question: str, pictures: Sequence[Picture] = ()) -> bool:
    """Return whether a question belongs to the held-out split.

    One question in `HELDOUT_ONE_IN` does, by the SHA-256 of its text and pictures.
    """
    digests = [picture.digest for picture in pictures]
    return stable_hash(question, *digests) % HELDOUT_ONE_IN == 0


def check_request(split: str, start: int, count: int) -> None:
    """Raise `TaskError` if the split is unknown, or if start or count is negative."""
    if split not in get_args(Split):
        raise TaskError(f"unknown split {split!r}; allowed: {', '.join(get_args(Split))}")
    if start < 0 or count < 0:
        raise TaskError(f"start={start} and count={count} must both be 0 or more")
