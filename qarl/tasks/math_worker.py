"""The reward function that runs in the workers of `qarl.tasks.math`.

Importing this module runs all parts of math-verify once. Otherwise an answer's time limit would
have to cover the cost of the first call (sympy, and the grammar's tables: seconds).
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from qarl.tasks.base import Problem
from qarl.tasks.rewards import last_box

_READ = (LatexExtractionConfig(),)
"""Extraction of references and answers, the same as verl's.

See `verl/utils/reward_score/math_verify.py`.
"""

# Its warning of a timeout quotes the whole answer.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math_answer(problem: Problem, text: str) -> float | None:
    r"""Return 1.0 if the text's last \boxed{…} has the value of the reference answer, else 0.0.

    Returns None if the reference answer itself cannot be read as mathematics.
    """
    reference = _reference(problem.answer)
    if not reference:
        return None
    boxed = last_box(text)
    return 0.0 if boxed is None else float(verify(list(reference), _parsed(boxed)))


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[Any, ...]:
    """Parse the reference answer, which may itself be in a box or between dollars."""
    return tuple(_parsed(last_box(answer) or answer.strip().strip("$")))


def _parsed(boxed: str, seconds: int = 5) -> list[Any]:
    return parse(f"\\boxed{{{boxed}}}", extraction_config=_READ, parsing_timeout=seconds)


# The first call is slow: it loads sympy and builds the grammar's tables.
verify(_parsed(r"\frac{1}{2}", seconds=0), _parsed("0.5", seconds=0), timeout_seconds=0)
