"""A task: a source of problems, a reward for training, and a checker for accuracy."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from qarl.configs.words import quoted
from qarl.tasks.base import (
    Problem,
    Response,
    RewardError,
    Scorer,
    Source,
    Split,
    TaskError,
    as_reward,
    as_verdict,
)
from qarl.tasks.table import Table

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """Problems and the functions that judge responses to them.

    Rewards train the policy, and accuracy counts verdicts. The two may differ.
    """

    source: Source
    """Source of the problems."""
    reward: Scorer
    """Reward function."""
    checker: Scorer | None
    """Function that decides which responses are right.

    Default: responses with a reward of 1 or more.
    """
    system: str | None = None
    """System prompt before every question."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template."""
    rollout: Callable[..., Any] | None = None
    """Function that converses with the policy over several turns (`qarl.conversations`).

    Default: each prompt is answered once.
    """
    time_limit: float | None = 60.0
    """Seconds that a rollout may take between two turns; None if the rollout has its own limit."""
    judges: Mapping[str, str | None] = field(default_factory=dict)
    """Names of the "reward" and the "checker" in the configuration, for messages."""

    @property
    def name(self) -> str:
        """Name that the task was loaded by."""
        return self.source.name

    def problems(
        self,
        split: Split,
        start: int,
        count: int,
        seed: int,
    ) -> list[Problem]:
        """Return the source's problems (see `Source.problems`) with the task's system prompt."""
        return self._with_system_prompt(self.source.problems(split, start, count, seed))

    def size(self, split: Split) -> int | None:
        """Return the number of problems of a split before they repeat.

        Returns None for a built-in task, which never repeats.
        """
        return len(self.source.by_split[split]) if isinstance(self.source, Table) else None

    def without_long_prompts(self, fits: Callable[[Sequence[Problem]], list[bool]]) -> "Task":
        """Return the task without the questions of a table whose prompts are too long.

        A built-in task is endless and stays as it is.

        fits: returns which prompts are short enough. Raises `TaskError` for a prompt that would
        begin with two system messages.
        """
        if not isinstance(self.source, Table):
            return self
        source = self.source.without_long_prompts(
            lambda problems: fits(self._with_system_prompt(problems))
        )
        return dataclasses.replace(self, source=source)

    def describe(self) -> str | None:
        """Return one line on the rows of a table, or None for a built-in task."""
        return self.source.describe() if isinstance(self.source, Table) else None

    def rewards(self, responses: Sequence[Response]) -> list[float | None]:
        """Return the reward of each response; None means no signal.

        Rewards that a rollout or an environment already gave are kept. Those of built-in tasks are
        in [0, 1].

        Raises:
            RewardError: A function failed, or returned a non-number, NaN or an infinity. The
                message quotes the problem and the completion.
        """
        unjudged = [response for response in responses if response.reward is None]
        rewards: list[float | None] = []
        if unjudged:
            rewards = self._read("reward", as_reward, unjudged, self.reward(unjudged))
        remaining = iter(rewards)
        return [
            next(remaining) if response.reward is None else response.reward
            for response in responses
        ]

    def correct(self, responses: Sequence[Response]) -> list[bool]:
        """Return whether each response is right.

        Raises `RewardError` if the checker failed or returned neither true nor false.
        """
        if self.checker is None:
            return rewarded(self.rewards(responses))
        return self._read("checker", as_verdict, responses, self.checker(responses))

    def _with_system_prompt(self, problems: Sequence[Problem]) -> list[Problem]:
        return [p if self.system is None else self._with_system(p, self.system) for p in problems]

    def _with_system(self, problem: Problem, system: str) -> Problem:
        first, *_ = problem.chat
        if first["role"] == "system":
            raise TaskError(
                f"task.system {quoted(system)} is given, but problem {problem.id!r} begins with a"
                f" system message of its own ({quoted(first['content'])}); omit one of them"
            )
        return problem.with_system_prompt(system)

    def _read(
        self,
        what: str,
        read: Callable[[Any], T],
        responses: Sequence[Response],
        outcomes: list[Any],
    ) -> list[T]:
        """Convert outcomes by `read`, whose `ValueError`s become `RewardError`s with the response.

        what: "reward" or "checker", for messages.
        """
        values = []
        for response, outcome in zip(responses, outcomes, strict=True):
            try:
                values.append(read(outcome))
            except ValueError as error:
                problem = response.problem
                judge = self.judges.get(what)
                named = f" {judge!r}" if judge else ""
                raise RewardError(
                    f"the {what}{named} of task {self.name!r} {error}\n "
                    f" problem id: {problem.id}\n  question: {problem.question!r}\n  completion:"
                    f" {response.text!r}"
                ) from None
        return values


def rewarded(rewards: Sequence[float | None]) -> list[bool]:
    """Return which responses count as right if there are only rewards."""
    return [reward is not None and reward >= 1 for reward in rewards]
