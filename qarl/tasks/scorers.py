"""From the words of the configuration to what judges responses: shipped ones by name, a person's by
file or module.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from qarl.configs.words import did_you_mean
from qarl.tasks.base import Failure, Response, Scorer, TaskError, WeightedSum, as_reward
from qarl.tasks.math import math_checker, math_scorer
from qarl.tasks.rewards import each, exact_answer
from qarl.tasks.signatures import TAKES, load_judge, outcomes
from qarl.tasks.worker import Job
from qarl.tasks.workers import Workers

_REWARDS: Mapping[str, Callable[[], Scorer]] = {
    "exact": lambda: each(exact_answer),
    "math": math_scorer,
}
_CHECKERS: Mapping[str, Callable[[], Scorer]] = {
    "exact": lambda: each(exact_answer),
    "math": math_checker,
}
_RETRY_SECONDS = (1.0, 10.0)
"""Before a reward that failed is asked again: what it asks over the network may need a moment."""
_log = logging.getLogger(__name__)
_TERM = re.compile(r"(?P<spec>.*?)(?:=(?P<weight>[^=:/]*))?")


def _weighted(outcomes: Mapping[str, Any], weights: Sequence[float]) -> Any:
    """The sum of several rewards of one response, by their names; one that gives no signal (None)
    adds nothing, and where none gives any, there is none.
    """
    for outcome in outcomes.values():
        if isinstance(outcome, Failure) or not isinstance(outcome, int | float | None):
            return outcome  # for the task to complain about
    pairs = zip(outcomes.values(), weights, strict=True)
    parts = [weight * outcome for outcome, weight in pairs if outcome is not None]
    return WeightedSum(sum(parts), dict(outcomes)) if parts else None


def reward_of(
    words: str, task: str, time_limit: float, memory_limit: float | None = None
) -> Scorer:
    """The reward that `words` name: one, or several with weights ("mine.py:a=1, mine.py:b=0.2").

    task: its name. time_limit: seconds for a call of a person's function. memory_limit: see `Job`.

    Raises:
        TaskError: unknown, not importable, of no known signature, or a weight that is no number.
    """
    specs, weights = zip(*(_term(part.strip()) for part in words.split(",")), strict=True)
    scorers = [_scorer("reward", spec, task, time_limit, memory_limit) for spec in specs]
    if weights == (1.0,):
        return scorers[0]
    if len(set(specs)) < len(specs):
        raise TaskError(f"task.reward {words!r} names a reward twice; add its weights up")
    short = [spec.rpartition(":")[2] for spec in specs]
    names = short if len(set(short)) == len(short) else specs
    return lambda responses: [
        _weighted(dict(zip(names, row, strict=True)), weights)
        for row in zip(*(scorer(responses) for scorer in scorers), strict=True)
    ]


def tolerant(scorer: Scorer, on_error: str) -> Scorer:
    """A reward whose failures, outcomes that are no reward among them, are what `task.on_error`
    says: final ("stop"), asked again, or no signal ("none"), which is said once a call.
    """
    if on_error == "stop":
        return scorer

    def outcomes(responses: Sequence[Response]) -> list[Any]:
        results = scorer(responses)
        for seconds in _RETRY_SECONDS if on_error == "retry" else ():
            failed = [place for place, outcome in enumerate(results) if _fault(outcome)]
            if failed:
                _log.warning(
                    "reward: %d of %d failed (%s); again in %g s",
                    *_said(results, failed),
                    seconds,
                )
                time.sleep(seconds)
                for place, outcome in zip(
                    failed, scorer([responses[place] for place in failed]), strict=True
                ):
                    results[place] = outcome
        failed = [place for place, outcome in enumerate(results) if _fault(outcome)]
        if failed and on_error == "none":
            _log.warning("reward: %d of %d failed (%s) and are left out", *_said(results, failed))
            return [None if _fault(outcome) else outcome for outcome in results]
        return results

    return outcomes


def _said(results: Sequence[Any], failed: Sequence[int]) -> tuple[int, int, str]:
    return len(failed), len(results), _fault(results[failed[0]])


def _fault(outcome: Any) -> str:
    """What is wrong with a reward's outcome; "" if nothing."""
    try:
        as_reward(outcome)
    except ValueError as error:
        return str(error)
    return ""


def checker_of(
    words: str, task: str, time_limit: float, memory_limit: float | None = None
) -> Scorer:
    """The checker that `words` name. Raises as `reward_of` does."""
    return _scorer("checker", words.strip(), task, time_limit, memory_limit)


def _term(text: str) -> tuple[str, float]:
    """ "mine.py:reward=0.5" → what is before the weight, and the weight, 1 where there is none."""
    parts = _TERM.fullmatch(text)
    assert parts is not None
    if parts["weight"] is None:
        return text, 1.0
    with suppress(ValueError):
        if weight := float(parts["weight"]):
            return parts["spec"].strip(), weight
    raise TaskError(
        f"reward {text!r}: the weight {parts['weight']!r} must be a number that is not 0, as in"
        " mine.py:reward=0.5"
    )


def _scorer(word: str, spec: str, task: str, time_limit: float, memory: float | None) -> Scorer:
    shipped = _REWARDS if word == "reward" else _CHECKERS
    if spec in shipped:
        return shipped[spec]()
    if ":" not in spec:
        near = did_you_mean(spec, shipped)
        raise TaskError(
            f"{word} {spec!r} must read file.py:function or package.module:function, or be one of"
            f" {', '.join(shipped)}{near}; a function is one {TAKES}"
        )
    if spec.startswith("qarl."):
        return in_this_process(word, spec, task, time_limit)
    path = tuple(sys.path)
    workers = Workers(
        Job(
            word=word,
            spec=spec,
            task=task,
            time_limit=time_limit,
            path=path,
            memory_limit=memory,
        )
    )
    workers.check()
    return workers


def in_this_process(word: str, spec: str, task: str, time_limit: float) -> Scorer:
    """A function that needs no process of its own, as ours do not. time_limit: of async ones
    alone.
    """
    kind, function = load_judge(word, spec)
    return lambda responses: list(outcomes(kind, function, task, responses, time_limit))
