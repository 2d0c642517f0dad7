"""Answers of a server."""

from typing import Any

ANSWER: dict[str, Any] = {
    "output_mode": "text",
    "choices": [
        {
            "token_ids": [5, 6],
            "text": "ab",
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.25}]},
            "weight_versions": [{"version": "3-d", "start": 0, "end": 2}],
        }
    ],
    "prompt_logprobs": [None, {"7": {"logprob": -0.5}}],
}


def altered(**fields: Any) -> dict[str, Any]:
    """Return the answer with other fields of the completion."""
    return {**ANSWER, "choices": [ANSWER["choices"][0] | fields]}
