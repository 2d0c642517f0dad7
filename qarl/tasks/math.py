r"""Judges mathematical answers in \boxed{…} by math-verify, as verl does.

The parsers of math-verify (https://github.com/huggingface/Math-Verify) and sympy may never finish,
and its own time limits are alarms, to which C code does not react. So it runs in worker processes
(`qarl.tasks.math_worker`), and an answer that is not judged in time is wrong.
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
"""Upper bound on judging one answer, in seconds.

math-verify's own limits, of 5 s for a parse and 5 s for a comparison, mostly come first.
"""
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""System prompt of `--task math`."""

_WORKERS = 8


def math_scorer() -> Scorer:
    """Return a `Scorer` of mathematical answers.

    The reward is 1.0 for a right answer, 0.0 for any other, and None if the reference cannot be
    read as mathematics. The scorer uses up to eight processes, started on first use. Equal answers
    to one reference, of which a group has many, are judged once.
    """

    def scores(responses: Sequence[Response]) -> list[float | None]:
        boxes = [(response.problem.answer, last_box(response.text)) for response in responses]
        by_box = dict(zip(boxes, responses, strict=True))
        judged = _pool()(list(by_box.values()))
        outcomes = dict(zip(by_box, judged, strict=True))
        return [0.0 if isinstance(outcomes[key], Failure) else outcomes[key] for key in boxes]

    return scores


def math_checker() -> Scorer:
    """Return `math_scorer` as a checker. If a reference cannot be read, no answer is right."""
    scorer = math_scorer()
    return lambda responses: [outcome == 1.0 for outcome in scorer(responses)]


@lru_cache(maxsize=1)
def _pool() -> Workers:
    job = Job(
        word="reward",
        spec="qarl.tasks.math_worker:math_answer",
        task="math",
        time_limit=TIME_LIMIT,
        path=tuple(sys.path),
    )
    return Workers(job, count=min(_WORKERS, os.cpu_count() or 1), goes_on=True)
