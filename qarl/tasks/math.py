r"""Mathematical answers in \boxed{…}, judged by math-verify
(https://github.com/huggingface/Math-Verify), as verl does.

Its parsers and sympy can take for ever, and its own time limits are alarms that C code does not
hear; so it runs in worker processes (`qarl.tasks.math_worker`), and what it is not done with in
time is wrong.
"""

import os
import sys
from collections.abc import Sequence
from functools import lru_cache

from qarl.tasks.base import Failure, Response, Scorer
from qarl.tasks.rewards import last_box
from qarl.tasks.worker import Job
from qarl.tasks.workers import Workers

TIME_LIMIT = 12.0
"""Seconds for one answer; math-verify's own limits, of 5 s for a parse and 5 s for a comparison,
mostly come first.
"""
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""The system prompt of `--task math`."""

_WORKERS = 8


def math_scorer() -> Scorer:
    """A `Scorer`: 1.0 for a right answer, 0.0 for any other, None where the reference cannot be
    read as mathematics.

    It works in up to eight processes, begun at the first use. Equal answers to one reference, of
    which a group has many, are judged once.
    """

    def scores(responses: Sequence[Response]) -> list[float | None]:
        boxes = [(response.problem.answer, last_box(response.text)) for response in responses]
        by_box = dict(zip(boxes, responses, strict=True))
        outcomes = dict(zip(by_box, _pool()(list(by_box.values())), strict=True))
        return [0.0 if isinstance(outcomes[key], Failure) else outcomes[key] for key in boxes]

    return scores


def math_checker() -> Scorer:
    """The same as verdicts: an answer to a problem whose reference cannot be read is not right."""
    scorer = math_scorer()
    return lambda responses: [outcome == 1.0 for outcome in scorer(responses)]


@lru_cache(maxsize=1)
def _pool() -> Workers:
    spec = "qarl.tasks.math_worker:math_answer"
    job = Job(
        word="reward",
        spec=spec,
        task="math",
        time_limit=TIME_LIMIT,
        path=tuple(sys.path),
    )
    return Workers(job, count=min(_WORKERS, os.cpu_count() or 1), goes_on=True)
