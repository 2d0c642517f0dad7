"""A task: where problems come from, what rewards them, and what counts as right."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
    """Problems, and what judges responses to them. Rewards train, accuracy counts verdicts: the two
    may differ.

    source: of problems. reward, checker: see `Scorer`; without a checker nothing says which
    responses are right, and those count as such that are rewarded with 1 or more. system: a system
    prompt before every question. template: arguments of the model's chat template. rollout: speaks
    with the policy over several turns (`qarl.conversations`), None: each prompt is answered once.
    time_limit: seconds a rollout may take between two turns; None: it has its own. judges: what the
    configuration calls the "reward" and the "checker", for messages.
    """

    source: Source
    reward: Scorer
    checker: Scorer | None
    system: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    rollout: Callable[..., Any] | None = None
    time_limit: float | None = 60.0
    judges: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name the task was loaded by."""
        return self.source.name

    def problems(self, split: Split, start: int, count: int, seed: int) -> list[Problem]:
        """The source's problems (see `Source.problems`), behind the task's system prompt."""
        return self._behind_system(self.source.problems(split, start, count, seed))

    def size(self, split: Split) -> int | None:
        """Problems of a split before they come round again; None for a built-in task, which has no
        end.
        """
        return len(self.source.by_split[split]) if isinstance(self.source, Table) else None

    def shortened(self, fits: Callable[[Sequence[Problem]], list[bool]]) -> "Task":
        """Without the questions of a table whose prompts are too long; a built-in task is endless
        and stays as it is. fits: which prompts are not too long. Raises `TaskError` for a prompt
        that begins with two system messages.
        """
        if not isinstance(self.source, Table):
            return self
        return dataclasses.replace(
            self,
            source=self.source.shortened(lambda problems: fits(self._behind_system(problems))),
        )

    def describe(self) -> str | None:
        """What a table's rows came down to; None for a built-in task."""
        return self.source.describe() if isinstance(self.source, Table) else None

    def rewards(self, responses: Sequence[Response]) -> list[float | None]:
        """A reward each, what a rollout or an environment gave already where it did; in [0, 1] for
        the built-in tasks, None where there is no signal.

        Raises:
            RewardError: a function failed, or returned a non-number, NaN or an infinity; the
            message quotes the problem
                and the completion.
        """
        unjudged = [response for response in responses if response.reward is None]
        of_task = iter(
            self._read("reward", as_reward, unjudged, self.reward(unjudged)) if unjudged else ()
        )
        return [
            next(of_task) if response.reward is None else response.reward for response in responses
        ]

    def correct(self, responses: Sequence[Response]) -> list[bool]:
        """Whether each is right. Raises `RewardError` where the checker failed or gave neither true
        nor false.
        """
        if self.checker is None:
            return rewarded(self.rewards(responses))
        return self._read("checker", as_verdict, responses, self.checker(responses))

    def _behind_system(self, problems: Sequence[Problem]) -> list[Problem]:
        return [p if self.system is None else self._with_system(p, self.system) for p in problems]

    def _with_system(self, problem: Problem, system: str) -> Problem:
        first, *_ = problem.chat
        if first["role"] == "system":
            raise TaskError(
                f"task.system {system[:80]!r} is given, but problem {problem.id!r} begins with a"
                f" system message of its own ({first['content'][:80]!r}); leave one of them out"
            )
        return problem.behind(system)

    def _read(
        self,
        what: str,
        read: Callable[[Any], T],
        responses: Sequence[Response],
        outcomes: list[Any],
    ) -> list[T]:
        """Outcomes as `read` has them. what: gave them, for messages."""
        values = []
        for response, outcome in zip(responses, outcomes, strict=True):
            try:
                values.append(read(outcome))
            except ValueError as error:
                problem, judge = response.problem, self.judges.get(what)
                raise RewardError(
                    f"the {what}{f' {judge!r}' if judge else ''} of task {self.name!r} {error}\n "
                    f" problem id: {problem.id}\n  question: {problem.question!r}\n  completion:"
                    f" {response.text!r}"
                ) from None
        return values


def rewarded(rewards: Sequence[float | None]) -> list[bool]:
    """Which count as right where rewards alone say so."""
    return [reward is not None and reward >= 1 for reward in rewards]
