"""Three kinds of reward functions, recognized by the names of their parameters.

    f(problem, text[, token_ids])                      QaRL's: one completion
    f([prompts,] completions | completion_ids, **columns)
                                                       TRL's (`GRPOTrainer`): a batch
    f(data_source, solution_str, ground_truth[, extra_info])
                                                       verl's `compute_score`: one completion

Any of them may be `async`: a function is called, and what it returns is awaited if it can be. So
instances with an async `__call__` and functions that return a coroutine are as good as `async def`.
"""

import asyncio
import functools
import inspect
import warnings
from collections.abc import (
    AsyncIterable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    Sized,
)
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from qarl.configs.functions import FunctionKind, load_function
from qarl.tasks.base import Failure, Response, TaskError
from qarl.tasks.rewards import attempt, failure_of

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


@dataclass(frozen=True)
class Together:
    """Notice that the next outcomes come all at once, within the time limit of one call."""


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
            " solution_str, ground_truth[, extra_info]); a wrapper shows those of what it wraps by"
            " functools.wraps"
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


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, method, partial, wrapper or instance is declared `async`.

    A wrapper is seen through if it was made by `functools.wraps`.
    """
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    call = inspect.unwrap(type(function).__call__)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def outcomes(
    kind: Kind,
    function: Callable[..., Any],
    task: str,
    responses: Sequence[Response],
    time_limit: float,
) -> Iterator[Any]:
    """Yield the outcome of each response, in order: the function's result, or a `Failure`.

    `Together` comes before outcomes that are not timed one by one: those of a batch, and of calls
    that are awaited, which run together.

    Args:
        kind: Kind of the function.
        function: The reward or checker.
        task: Name of the task, which is verl's data_source if rows have none.
        responses: Responses to judge.
        time_limit: Upper bound on each call that is awaited, in seconds. Other calls are timed by
            the process that waits for them.
    """
    if kind == "trl":
        yield Together()
        yield from _batch(function, responses, time_limit)
        return
    for index, response in enumerate(responses):
        outcome = _begun(function, _arguments(kind, function, task, response))
        if not is_pending(outcome):
            yield _judged(kind, outcome)
            continue
        yield Together()
        rest = [_arguments(kind, function, task, later) for later in responses[index + 1 :]]
        calls = [functools.partial(_begun, function, arguments) for arguments in rest]
        for awaited in _awaited([functools.partial(settled, outcome), *calls], time_limit):
            yield _judged(kind, awaited)
        return


def _judged(kind: Kind, outcome: Any) -> Any:
    """Return the score if a function of verl's kind returned a mapping, else the outcome."""
    if kind == "verl" and isinstance(outcome, dict) and "score" in outcome:
        return outcome["score"]
    return outcome


def _begun(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function. Return its result, an awaitable of it, or a `Failure` with its error."""
    asyncio.set_event_loop(_loop())  # futures that the function makes belong to this loop
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        if isinstance(error, RuntimeError) and "no running event loop" in str(error):
            with warnings.catch_warnings():
                # the call may have left a coroutine behind, which ends with its frame
                warnings.simplefilter("ignore", RuntimeWarning)
                error.with_traceback(None)
            return _within_the_loop(function, arguments)
        return failure_of(error)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop, the same for all calls.

    A client that a function keeps from one call to the next belongs to its loop.
    """
    return asyncio.new_event_loop()


async def _within_the_loop(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    return await settled(function(**arguments))


def is_pending(outcome: Any) -> bool:
    """Return whether an outcome is to be awaited, by `settled`."""
    return inspect.isawaitable(outcome) or isinstance(outcome, AsyncIterable)


async def settled(outcome: Any) -> Any:
    """Await an outcome until it is none to await, and collect an asynchronous generator."""
    while inspect.isawaitable(outcome):
        outcome = await outcome
    if isinstance(outcome, AsyncIterable):
        return [each async for each in outcome]
    return outcome


def _awaited(
    calls: Sequence[Callable[[], Any]],
    time_limit: float,
) -> list[Any]:
    """Return the outcomes of calls that run together, each at most `time_limit` seconds."""

    async def one(call: Callable[[], Any]) -> Any:
        limit = asyncio.timeout(time_limit)
        try:
            async with limit:
                return await settled(call())
        # A TimeoutError may be the function's own, so ask `limit`.
        except (Exception, SystemExit) as error:
            return Failure(too_long(time_limit)) if limit.expired() else failure_of(error)

    async def together() -> list[Any]:
        return list(await asyncio.gather(*map(one, calls)))

    return _loop().run_until_complete(together())


def _batch(
    function: Callable[..., Any], responses: Sequence[Response], time_limit: float
) -> list[Any]:
    try:
        arguments = _columns(function, responses)
    except SignatureError as error:
        return [Failure(f"cannot be called: {error}")] * len(responses)
    outcome = _begun(function, arguments)
    if is_pending(outcome):
        (outcome,) = _awaited([functools.partial(settled, outcome)], time_limit)
    if not isinstance(outcome, Failure):
        outcome = attempt(_listed, outcome, len(responses))
    return [outcome] * len(responses) if isinstance(outcome, Failure) else outcome


def _listed(outcome: Any, count: int) -> list[Any] | Failure:
    """Return a batch's outcomes as a list of `count`, or a `Failure` if they are not as many.

    They may be a list, a tuple, a generator, an array, a tensor of any dtype and device, a series:
    whatever has an order. Texts, mappings and sets are no outcomes of completions in order.
    """
    kind = type(outcome).__name__
    size = f" of shape {tuple(outcome.shape)}" if hasattr(outcome, "shape") else ""
    if hasattr(outcome, "tolist"):
        outcome = outcome.tolist()
    if not size and isinstance(outcome, Sized):
        size = f" of {len(outcome)}"
    unordered = isinstance(outcome, str | bytes | Mapping | Set)
    if isinstance(outcome, Iterable) and not unordered:
        # one more than asked for, because a generator may be endless
        values = list(islice(outcome, count + 1))
        if len(values) == count:
            return values
        size = size or f" of {f'more than {count}' if len(values) > count else len(values)}"
    return Failure(
        f"returned a {kind}{size} for {count} completions; give one number for each, in a list, an"
        " array or a tensor"
    )


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

    A completion is a chat if its problem is one (`Problem.messages`), else text. The problems'
    columns are lists. Raises `SignatureError` if the function needs a column that no problem has.
    """
    problems = [response.problem for response in responses]
    names = dict.fromkeys(name for problem in problems for name in problem.metadata)
    columns: dict[str, Any] = {}
    for name in names:
        columns[name] = [problem.metadata.get(name) for problem in problems]
    columns |= {
        "prompts": [problem.chat if problem.messages else problem.question for problem in problems],
        "completions": [
            [{"role": "assistant", "content": response.text}]
            if response.problem.messages
            else response.text
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
