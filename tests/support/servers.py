"""Answers of a server."""

from typing import Any

from tests.support.cases import cases

ANSWER: dict[str, Any] = cases(__file__, "answer")


def altered(**fields: Any) -> dict[str, Any]:
    """Return the answer with other fields of the completion."""
    return {**ANSWER, "choices": [ANSWER["choices"][0] | fields]}
