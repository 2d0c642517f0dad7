"""Rewards and verdicts that ship with QaRL, as plain functions of a problem and a completion's
text.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from qarl.configs.functions import in_words
from qarl.tasks.base import Failure, Problem, Response, Scorer

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
"""What opens or closes a box or a group; an escaped brace does neither."""


def exact_reward(problem: Problem, text: str) -> float:
    """1.0 where the completion equals the reference answer, both stripped of surrounding space,
    else 0.0.
    """
    return float(text.strip() == problem.answer.strip())


def short_reward(problem: Problem, text: str) -> float:
    r"""Minus the completion's characters: 0 where the policy ends at once. It asks nothing of the
    problem.
    """
    return -float(len(text))


def exact_answer(problem: Problem, text: str) -> bool:
    r"""Whether the completion is the reference answer, or its last \boxed{…} holds it; surrounding
    space aside.
    """
    answer = problem.answer.strip()
    return text.strip() == answer or last_box(text) == answer


def last_box(text: str) -> str | None:
    r"""What the last complete \boxed{…} of a text holds, stripped, with braces inside paired; None
    without one. Of boxes within each other, the outermost.
    """
    opened: list[int | None] = []
    last = None
    for mark in _BRACE.finditer(text):
        if mark[0].endswith("{") and mark[0] != r"\{":
            opened.append(mark.end() if mark[0] != "{" else None)
        elif mark[0] == "}" and opened and (start := opened.pop()) is not None:
            # an outer box is complete after the ones within it
            last = text[start : mark.start()]
    return None if last is None else last.strip()


def attempt(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What a function returns, or a `Failure` with what it raised."""
    try:
        return function(*arguments, **named)
    except (Exception, SystemExit) as error:
        as_chat = isinstance(error, TypeError) and "string indices" in str(error)
        hint = (
            "; completions are chats where questions are, or with task.system, and text elsewhere"
            if as_chat
            else ""
        )
        return Failure(f"raised {in_words(error)}{hint}")


def no_signal(responses: Sequence[Response]) -> list[Any]:
    """The reward of a task whose environment gives its own."""
    return [None] * len(responses)


def each(function: Callable[[Problem, str], Any]) -> Scorer:
    """A scorer that asks `function` about one response at a time, in this process."""
    return lambda responses: [
        attempt(function, response.problem, response.text) for response in responses
    ]
