"""Loads the rewards and checkers that a configuration names.

Shipped ones have a name; a person's are functions in a file or module.
"""

import logging
import math
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
from qarl.tasks.signatures import TAKES, Together, load_judge, outcomes
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
"""Seconds to wait before each retry of a reward that failed.

A service that it calls over the network may need a moment.
"""
_log = logging.getLogger(__name__)
_TERM = re.compile(r"(?P<spec>.*?)(?:=(?P<weight>[^=:/]*))?")


def _weighted(outcomes: Mapping[str, Any], weights: Sequence[float]) -> Any:
    """Return the weighted sum of several rewards of one response.

    A reward without a signal (None) adds nothing. Returns None if none gives a signal, and the
    outcome itself if one is invalid, so that the task reports it.

    Args:
        outcomes: Reward's name → outcome.
        weights: One per reward, in the same order.
    """
    for outcome in outcomes.values():
        if isinstance(outcome, Failure) or not isinstance(outcome, int | float | None):
            return outcome
    pairs = zip(outcomes.values(), weights, strict=True)
    parts = [weight * outcome for outcome, weight in pairs if outcome is not None]
    return WeightedSum(sum(parts), dict(outcomes)) if parts else None


def reward_of(
    words: str, task: str, time_limit: float, memory_limit: float | None = None
) -> Scorer:
    """Load the reward that `words` names, or the sum of several with weights.

    Several are written like "mine.py:a=1, mine.py:b=0.2".

    Args:
        words: The configured text.
        task: Name of the task.
        time_limit: Upper bound on a call of a person's function, in seconds.
        memory_limit: See `Job`.

    Raises:
        TaskError: A function is unknown, not importable, or of no known signature, or a weight is
            no number.
    """
    terms = [_term(part.strip()) for part in words.split(",")]
    specs, weights = zip(*terms, strict=True)
    scorers = [_scorer("reward", spec, task, time_limit, memory_limit) for spec in specs]
    if weights == (1.0,):
        return scorers[0]
    if len(set(specs)) < len(specs):
        raise TaskError(f"task.reward {words!r} names a reward twice; add its weights up")
    short = [spec.rpartition(":")[2] for spec in specs]
    names = short if len(set(short)) == len(short) else specs

    def sums(responses: Sequence[Response]) -> list[Any]:
        by_scorer = [scorer(responses) for scorer in scorers]
        by_response = zip(*by_scorer, strict=True)
        return [_weighted(dict(zip(names, row, strict=True)), weights) for row in by_response]

    return sums


def judges_alone(words: str | None) -> bool:
    """Return whether a reward's terms are all functions of a person's own, which need no answers.

    words: the configured text; None for the task's own reward. QaRL's rewards compare with answers,
    whether their short names or their modules are given.
    """
    if words is None:
        return False
    specs = [_term(part.strip())[0] for part in words.split(",")]
    return all(":" in spec and not spec.startswith("qarl.") for spec in specs)


def tolerant(scorer: Scorer, on_error: str) -> Scorer:
    """Return a reward that handles failures as `task.on_error` says.

    A failure is final ("stop"), is retried ("retry"), or becomes no signal, with one warning per
    call ("none"). Invalid outcomes count as failures.
    """
    if on_error == "stop":
        return scorer

    def outcomes(responses: Sequence[Response]) -> list[Any]:
        results = scorer(responses)
        waits = _RETRY_SECONDS if on_error == "retry" else ()
        for seconds in waits:
            failed = [index for index, outcome in enumerate(results) if _fault(outcome)]
            if failed:
                _log.warning(
                    "reward: %d of %d failed (%s); again in %g s",
                    *_summary(results, failed),
                    seconds,
                )
                time.sleep(seconds)
                retried = scorer([responses[index] for index in failed])
                for index, outcome in zip(failed, retried, strict=True):
                    results[index] = outcome
        failed = [index for index, outcome in enumerate(results) if _fault(outcome)]
        if failed and on_error == "none":
            _log.warning(
                "reward: %d of %d failed (%s) and are left out", *_summary(results, failed)
            )
            return [None if _fault(outcome) else outcome for outcome in results]
        return results

    return outcomes


def _summary(
    results: Sequence[Any],
    failed: Sequence[int],
) -> tuple[int, int, str]:
    """Return the number of failures, the number of outcomes, and the first failure's reason."""
    return len(failed), len(results), _fault(results[failed[0]])


def _fault(outcome: Any) -> str:
    """Return what is wrong with a reward's outcome, "" if nothing."""
    try:
        as_reward(outcome)
    except ValueError as error:
        return str(error)
    return ""


def checker_of(
    words: str, task: str, time_limit: float, memory_limit: float | None = None
) -> Scorer:
    """Load the checker that `words` names. Raises the same errors as `reward_of`."""
    return _scorer("checker", words.strip(), task, time_limit, memory_limit)


def _term(text: str) -> tuple[str, float]:
    """Split "mine.py:reward=0.5" into the function and its weight. Default: 1."""
    parts = _TERM.fullmatch(text)
    assert parts is not None
    if parts["weight"] is None:
        return text, 1.0
    with suppress(ValueError):
        weight = float(parts["weight"])
        if weight != 0 and math.isfinite(weight):
            return parts["spec"].strip(), weight
    raise TaskError(
        f"reward {text!r}: the weight {parts['weight']!r} must be a finite number that is not 0, as"
        " in mine.py:reward=0.5"
    )


def _scorer(
    word: str,
    spec: str,
    task: str,
    time_limit: float,
    memory: float | None,
) -> Scorer:
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
    job = Job(
        word=word,
        spec=spec,
        task=task,
        time_limit=time_limit,
        path=tuple(sys.path),
        memory_limit=memory,
    )
    workers = Workers(job)
    workers.check()
    return workers


def in_this_process(word: str, spec: str, task: str, time_limit: float) -> Scorer:
    """Return a scorer that calls a function in this process, as those that ship with QaRL allow.

    time_limit: applies only to calls that are awaited.
    """
    kind, function = load_judge(word, spec)

    def scorer(responses: Sequence[Response]) -> list[Any]:
        judged = outcomes(kind, function, task, responses, time_limit)
        return [outcome for outcome in judged if not isinstance(outcome, Together)]

    return scorer
