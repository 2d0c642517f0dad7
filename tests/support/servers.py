"""What a server answers."""

import copy
from typing import Any

ANSWER: dict[str, Any] = {
    "output_mode": "text",
    "choices": [{
        "token_ids": [5, 6], "text": "ab", "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.25}]},
        "weight_versions": [{"version": "3-d", "start": 0, "end": 2}],
    }],
    "prompt_logprobs": [None, {"7": {"logprob": -0.5}}],
}  # fmt: skip


def altered(**fields: Any) -> dict[str, Any]:
    """With other fields of the completion."""
    answer = copy.deepcopy(ANSWER)
    answer["choices"][0] |= fields
    return answer
