"""Three kinds of reward functions, recognized by the names of their parameters.

    f(problem, text[, token_ids])                      QaRL's: one completion
    f([prompts,] completions | completion_ids, **columns)
                                                       TRL's (`GRPOTrainer`): a batch
    f(data_source, solution_str, ground_truth[, extra_info])
                                                       verl's `compute_score`: one completion

Any of them may be `async`.
"""

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from qarl.configs.functions import FunctionKind, in_words, load_function
from qarl.tasks.base import Failure, Response, TaskError
from qarl.tasks.rewards import attempt

Kind = Literal["qarl", "trl", "verl"]

_MARKS: dict[Kind, tuple[str, ...]] = {
    "qarl": ("text",),
    "trl": ("completions", "completion_ids", "completions_ids"),
    "verl": ("solution_str",),
}
"""Parameters by which a kind is recognized: it has one of them, and the other kinds have none."""
_OWN = ("problem", "text", "token_ids")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL = (
    "prompts",
    "completions",
    "completion_ids",
    "completions_ids",
    "log_metric",
    "log_extra",
)
_ANSWERS = ("solution", "ground_truth")
"""Names of the reference answer in TRL's documentation and in its own rewards."""

TAKES = (
    "taking (problem, text), TRL's (completions, **columns) or verl's (data_source, solution_str,"
    " ground_truth)"
)


class SignatureError(Exception):
    """A function of no known kind. The message follows the function's name."""


def load_judge(word: str, spec: str) -> tuple[Kind, Callable[..., Any]]:
    """Load the function that `spec` names, and return its kind and the function.

    word: "reward" or "checker", for messages. Raises `TaskError` if it cannot be used.
    """
    function = load_function(FunctionKind(word, TAKES, TaskError), spec)
    try:
        return kind_of(function), function
    except SignatureError as error:
        raise TaskError(f"{word} {spec!r}: {error}") from error


def too_long(seconds: float) -> str:
    """Return the reason of a failure: the call was not done in `seconds`."""
    return f"took longer than task.time_limit {seconds:g} s; raise it, or bound the function"


def kind_of(function: Callable[..., Any]) -> Kind:
    """Return the kind of a function.

    Raises `SignatureError` if its parameters are of no kind, or of several.
    """
    parameters = _parameters(function)
    kinds: list[Kind] = [kind for kind, marks in _MARKS.items() if parameters.keys() & marks]
    shown = f"({', '.join(str(parameter) for parameter in parameters.values())})"
    if len(kinds) != 1:
        fault = "are of no kind of reward that is known"
        if kinds:
            fault = f"are of {len(kinds)} kinds of reward at once"
        raise SignatureError(
            f"its parameters {shown} {fault}; name them (problem, text[, token_ids]), TRL's"
            " ([prompts,] completions[, completion_ids], **columns) or verl's (data_source,"
            " solution_str, ground_truth[, extra_info])"
        )
    kind = kinds[0]
    known = {"qarl": _OWN, "verl": _VERL}.get(kind)
    for name, parameter in parameters.items():
        if known and name not in known and _needed(parameter):
            raise SignatureError(
                f"its parameters {shown} have {name!r}, which a reward of {kind}'s kind is not"
                f" given; it is given {', '.join(known)}: leave {name!r} out, or give it a default"
            )
    return kind


def call_one_by_one(kind: Kind, function: Callable[..., Any]) -> bool:
    """Return whether outcomes come one at a time.

    They do not from a batch function, nor from an async function, whose calls run together.
    """
    return kind != "trl" and not inspect.iscoroutinefunction(function)


def outcomes(
    kind: Kind,
    function: Callable[..., Any],
    task: str,
    responses: Sequence[Response],
    time_limit: float,
) -> Iterator[Any]:
    """Yield the outcome of each response, in order: the function's result, or a `Failure`.

    Args:
        kind: Kind of the function.
        function: The reward or checker.
        task: Name of the task, which is verl's data_source if rows have none.
        responses: Responses to judge.
        time_limit: Upper bound on each call of an async function, in seconds. Other calls are timed
            by the process that waits for them.
    """
    if kind == "trl":
        yield from _batch(function, responses, time_limit)
    elif inspect.iscoroutinefunction(function):
        calls = [_arguments(kind, function, task, response) for response in responses]
        for outcome in asyncio.run(_together(calls, function, time_limit)):
            yield _judged(kind, outcome)
    else:
        for response in responses:
            yield _judged(kind, attempt(function, **_arguments(kind, function, task, response)))


def _judged(kind: Kind, outcome: Any) -> Any:
    """Return the score if a function of verl's kind returned a mapping, else the outcome."""
    if kind == "verl" and isinstance(outcome, dict) and "score" in outcome:
        return outcome["score"]
    return outcome


async def _together(
    calls: Sequence[dict[str, Any]], function: Callable[..., Any], time_limit: float
) -> list[Any]:
    async def one(arguments: dict[str, Any]) -> Any:
        limit = asyncio.timeout(time_limit)
        try:
            async with limit:
                return await function(**arguments)
        # A TimeoutError may be the function's own, so ask `limit`.
        except (Exception, SystemExit) as error:
            return Failure(too_long(time_limit) if limit.expired() else f"raised {in_words(error)}")

    return list(await asyncio.gather(*map(one, calls)))


def _batch(
    function: Callable[..., Any], responses: Sequence[Response], time_limit: float
) -> list[Any]:
    try:
        arguments = _columns(function, responses)
    except SignatureError as error:
        return [Failure(f"cannot be called: {error}")] * len(responses)
    if inspect.iscoroutinefunction(function):
        outcome = asyncio.run(_together([arguments], function, time_limit))[0]
    else:
        outcome = attempt(function, **arguments)
    if isinstance(outcome, Failure):
        return [outcome] * len(responses)
    if not isinstance(outcome, list | tuple) or len(outcome) != len(responses):
        size = f" of {len(outcome)}" if isinstance(outcome, list | tuple) else ""
        words = (
            f"returned a {type(outcome).__name__}{size} for {len(responses)} completions; give a"
            " list, one for each"
        )
        return [Failure(words)] * len(responses)
    return list(outcome)


def _arguments(
    kind: Kind, function: Callable[..., Any], task: str, response: Response
) -> dict[str, Any]:
    problem = response.problem
    if kind == "qarl":
        arguments = {
            "problem": problem,
            "text": response.text,
            "token_ids": response.token_ids,
        }
    else:
        arguments = {
            "data_source": problem.metadata.get("data_source", task),
            "solution_str": response.text,
            "ground_truth": problem.answer,
            "extra_info": problem.metadata.get("extra_info", problem.metadata),
        }
    return _accepted(function, arguments)


def _columns(
    function: Callable[..., Any],
    responses: Sequence[Response],
) -> dict[str, Any]:
    """Return a batch's arguments as TRL passes them.

    Completions are chats if problems are (`Problem.messages`), else texts. The problems' columns
    are lists. Raises `SignatureError` if the function needs a column that no problem has.
    """
    problems = [response.problem for response in responses]
    chat = bool(problems[0].messages)
    names = dict.fromkeys(name for problem in problems for name in problem.metadata)
    columns: dict[str, Any] = {}
    for name in names:
        columns[name] = [problem.metadata.get(name) for problem in problems]
    columns |= {
        "prompts": [problem.chat if chat else problem.question for problem in problems],
        "completions": [
            [{"role": "assistant", "content": response.text}] if chat else response.text
            for response in responses
        ],
        "completion_ids": [list(response.token_ids) for response in responses],
        "log_metric": _ignored,
        "log_extra": _ignored,
    }
    columns["completions_ids"] = columns["completion_ids"]  # its name in older releases
    parameters = _parameters(function)
    # Rows of prompts alone have the answer "", which a reward would take for a reference.
    if any(problem.answer for problem in problems):
        for name in ("answer", *(name for name in _ANSWERS if name in parameters)):
            columns.setdefault(name, [problem.answer for problem in problems])
    missing = [
        name for name, parameter in parameters.items() if _needed(parameter) and name not in columns
    ]
    if missing:
        present = ", ".join(name for name in columns if name not in _TRL) or "none but prompts"
        hint = ""
        if missing[0] == "trainer_state":
            hint = "; the state of a trainer is not known where rewards run"
        raise SignatureError(
            f"it asks for a column {missing[0]!r}, and the task has {present}{hint}"
        )
    return _accepted(function, columns)


def _ignored(*_: Any, **__: Any) -> None:
    """Ignore what TRL's functions for logging get, because there is no trainer."""
    warnings.warn("what a reward logs by log_metric or log_extra is not kept", stacklevel=2)


def _accepted(
    function: Callable[..., Any],
    arguments: dict[str, Any],
) -> dict[str, Any]:
    parameters = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise SignatureError("its parameters cannot be read; wrap it in a function") from None


def _needed(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and parameter.kind not in variadic
