"""What a server answers."""

import copy
from typing import Any

from tests.support.cases import cases

ANSWER: dict[str, Any] = cases(__file__, "answer")


def altered(**fields: Any) -> dict[str, Any]:
    """With other fields of the completion."""
    answer = copy.deepcopy(ANSWER)
    answer["choices"][0] |= fields
    return answer
