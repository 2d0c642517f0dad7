"""An objective written by the user.

    --objective own --learner.objective.function mine.py:objective

The function is called like those of this folder (`learner.objectives.base.Objective`), for every
micro-batch, with the section of the configuration as `config`. Its correction is token_tis unless
the configuration names another.
"""

import functools
from typing import Any

import torch

from qarl.configs.errors import ConfigError, QarlError
from qarl.configs.functions import FunctionKind, describe_error, load_function
from qarl.learner.objectives.base import Objective, ObjectiveInput, ObjectiveResult

_KIND = FunctionKind(
    "objective", "taking (inputs, config) and returning an ObjectiveResult", ConfigError
)


class ObjectiveError(QarlError, heading="objective"):
    """The user's objective raised, or did not return a valid result."""


@functools.cache
def own(spec: str) -> Objective:
    """Return the function that `spec` names, wrapped in a check of its results.

    Raises `ConfigError` if it is not found.
    """
    function = load_function(_KIND, spec)

    def checked(inputs: ObjectiveInput, config: Any) -> ObjectiveResult:
        try:
            result = function(inputs, config)
        except (Exception, SystemExit) as error:
            raise ObjectiveError(f"objective {spec!r} raised {describe_error(error)}") from error
        fault = _fault(result, inputs)
        if fault:
            raise ObjectiveError(f"objective {spec!r} returned {fault}")
        return result

    return checked


def _fault(result: Any, inputs: ObjectiveInput) -> str:
    """Return what is wrong with a result, in words; "" if nothing."""
    if not isinstance(result, ObjectiveResult):
        return (
            f"{type(result).__name__}; return qarl.learner.objectives.ObjectiveResult(loss,"
            " clipped)"
        )
    rows, tokens = inputs.current.shape
    shapes = ((rows, tokens), (rows, 1))
    for name in ("loss", "clipped"):
        value = getattr(result, name)
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape not in shapes:
            return (
                f"{name} {shape}; allowed are tensors {shapes[0]}, one value a token, and"
                f" {shapes[1]}, one a sequence"
            )
    if result.clipped.dtype != torch.bool:
        return f"clipped of {result.clipped.dtype}; allowed is torch.bool"
    if torch.is_grad_enabled() and inputs.current.requires_grad and not result.loss.requires_grad:
        return "a loss without gradient; it must depend on inputs.current"
    return ""
