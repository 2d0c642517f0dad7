r"""What a worker of `qarl.tasks.math` imports: math-verify, once through all its parts, so that no
answer's time limit has to cover what the first costs (sympy, and the grammar's tables: seconds).
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from qarl.tasks.base import Problem
from qarl.tasks.rewards import last_box

_READ = (LatexExtractionConfig(),)
"""As verl reads references and answers (`verl/utils/reward_score/math_verify.py`)."""

# it warns of a time-out with all of the answer
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math_answer(problem: Problem, text: str) -> float | None:
    r"""1.0 where the last \boxed{…} of the text holds a value equal to the reference answer, 0.0
    where it does not or there is none; None where the reference answer itself cannot be read as
    mathematics.
    """
    reference = _reference(problem.answer)
    if not reference:
        return None
    boxed = last_box(text)
    return 0.0 if boxed is None else float(verify(list(reference), _parsed(boxed)))


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[Any, ...]:
    """The reference answer, which may itself be in a box or between dollars."""
    return tuple(_parsed(last_box(answer) or answer.strip().strip("$")))


def _parsed(boxed: str, seconds: int = 5) -> list[Any]:
    return parse(f"\\boxed{{{boxed}}}", extraction_config=_READ, parsing_timeout=seconds)


verify(_parsed(r"\frac{1}{2}", seconds=0), _parsed("0.5", seconds=0), timeout_seconds=0)
