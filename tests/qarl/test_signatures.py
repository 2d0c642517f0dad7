"""Functions of any shape as rewards, drawn.

tests/qarl/test_rewards.py has each shape by itself, written as a person would, and the process that
functions run in.
"""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from qarl.tasks import Problem, Response
from qarl.tasks.signatures import Together, kind_of, outcomes

TEXTS = ("7", "8", "7", "", "7")
SCORES = [1.0, 0.0, 1.0, 0.0, 1.0]
NUMBERS = (float, int, bool, numpy.float32, numpy.bool_, torch.tensor)
LISTS = (list, tuple, iter, numpy.array, torch.tensor, lambda scores: (each for each in scores))


def core(draw: random.Random, kind: str) -> Callable[..., Any]:
    """Return a function of a kind that gives 1 where the text is the answer, in a drawn type."""
    number = draw.choice(NUMBERS)
    if kind == "qarl":
        return lambda problem, text: number(text == problem.answer)
    if kind == "verl":
        return lambda data_source, solution_str, ground_truth, extra_info=None: number(
            solution_str == ground_truth
        )
    make = draw.choice(LISTS)
    return lambda completions, answer, **columns: make(
        [float(text == each) for text, each in zip(completions, answer, strict=True)]
    )


def partial(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function)


def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return inner


def asynchronous(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def inner(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return inner


def instance(function: Callable[..., Any]) -> Callable[..., Any]:
    class Instance:
        __signature__ = inspect.signature(function)

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return function(*arguments, **named)

    return Instance()


def asynchronous_instance(function: Callable[..., Any]) -> Callable[..., Any]:
    return instance(asynchronous(function))


SHAPES = (partial, wrapper, asynchronous, instance, asynchronous_instance)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_a_callable_of_any_shape_gives_its_cores_scores(seed: int):
    """Contract: none of up to four layers around a function changes an outcome, nor does the type
    that it returns. Drawn: kind, layers, type of the numbers, container of a batch's.
    """
    draw = random.Random(seed)
    kind = draw.choice(["qarl", "trl", "verl"])
    function = core(draw, kind)
    for shape in draw.choices(SHAPES, k=draw.randint(0, 4)):
        function = shape(function)
    assert kind_of(function) == kind
    problem = Problem("p", "3 + 4 =", "7")
    responses = [Response(problem, text) for text in TEXTS]
    given = outcomes(kind, function, "q.jsonl", responses, time_limit=5.0)  # type: ignore[arg-type]
    scores = [float(each) for each in given if not isinstance(each, Together)]
    assert scores == SCORES
