"""Rewards and checkers that ship with QaRL, as functions of a problem and a completion's text."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from qarl.configs.functions import describe_error
from qarl.tasks.base import Failure, Problem, Response, Scorer

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
"""Matches what opens or closes a box or a group. An escaped brace does neither."""


def exact_reward(problem: Problem, text: str) -> float:
    """Return 1.0 if the completion equals the reference answer, else 0.0.

    Both are stripped of surrounding space.
    """
    return float(text.strip() == problem.answer.strip())


def short_reward(problem: Problem, text: str) -> float:
    """Return minus the number of characters of the completion, whatever the problem.

    The maximum, 0, is a policy that ends at once.
    """
    return -float(len(text))


def exact_answer(problem: Problem, text: str) -> bool:
    r"""Return whether the completion, or its last \boxed{…}, is the reference answer.

    Surrounding space is ignored.
    """
    answer = problem.answer.strip()
    return text.strip() == answer or last_box(text) == answer


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{…} of a text, stripped, or None.

    Braces inside it are paired. Of nested boxes, the outermost counts.
    """
    opened: list[int | None] = []
    last = None
    for mark in _BRACE.finditer(text):
        if mark[0].endswith("{") and mark[0] != r"\{":
            opened.append(mark.end() if mark[0] != "{" else None)
        elif mark[0] == "}" and opened:
            start = opened.pop()
            # An outer box is complete after the boxes inside it, so it wins.
            if start is not None:
                last = text[start : mark.start()]
    return None if last is None else last.strip()


def attempt(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return a function's result, or a `Failure` with its error."""
    try:
        return function(*arguments, **named)
    except (Exception, SystemExit) as error:
        return failure_of(error)


def failure_of(error: BaseException) -> Failure:
    """Return the `Failure` of a function that raised `error`."""
    hint = ""
    # The function treated a text as a chat.
    if isinstance(error, TypeError) and "string indices" in str(error):
        hint = (
            "; completions are chats where questions are, or with task.system, and text elsewhere"
        )
    return Failure(f"raised {describe_error(error)}{hint}")


def no_signal(responses: Sequence[Response]) -> list[Any]:
    """Return no reward for each response, for tasks whose environment gives rewards itself."""
    return [None] * len(responses)


def each(function: Callable[[Problem, str], Any]) -> Scorer:
    """Return a scorer that calls `function` for one response at a time, in this process."""
    return lambda responses: [
        attempt(function, response.problem, response.text) for response in responses
    ]
