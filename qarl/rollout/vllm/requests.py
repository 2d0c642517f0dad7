"""A completion's sampling parameters in vLLM's words, the same for an engine in this process and
for a server; and its text, made of its tokens once it is whole, as vLLM makes it token by token.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qarl.rollout.types import Prompt, Sampling

_LONGEST_PERIOD = 8
"""Tokens of a loop that is ended, as of those that metrics count (`qarl.report.error_tokens`)."""


def sampling_arguments(sampling: Sampling, prompt: Prompt, j: int, k: int) -> dict[str, Any]:
    """Of sample k of a prompt, the call's j-th: `vllm.SamplingParams` by name, plain data
    throughout.
    """
    loops = None
    if sampling.loop_limit is not None:
        loops = {
            "max_pattern_size": _LONGEST_PERIOD,
            "min_pattern_size": 1,
            "min_count": sampling.loop_limit,
        }
    draws = prompt.draws or (sampling.first_prompt + j, k, 0)
    limit = sampling.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": limit,
        "logprobs": 0,
        "stop": list(sampling.stop) or None,
        "repetition_detection": loops,
        "ignore_eos": sampling.ignore_end,
        "seed": _stream(sampling.seed, *draws) if sampling.temperature > 0 else None,
        # Texts are made at the end (`text_of`), but where a stop text has to be seen. While it
        # samples vLLM would also decode every sampled token by itself, for its log-prob's label,
        # between two steps of the model.
        "detokenize": bool(sampling.stop),
        "flat_logprobs": True,  # a few lists a request instead of two objects a token
        "skip_clone": True,  # they are this request's alone
    }


def scoring_arguments() -> dict[str, Any]:
    """Of a request for the log-probs of its prompt's tokens, without labels; vLLM asks for one
    sampled token.
    """
    return {
        "temperature": 0,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "detokenize": False,
    }


def _stream(seed: int, prompt: int, sample: int, turn: int) -> int:
    """A 63-bit seed for one completion; mixes (seed, prompt, sample), and a later turn, so streams
    do not overlap.
    """
    later = f"/{turn}" if turn else ""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}{later}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer that vLLM takes from a checkpoint folder, without an engine."""
    from qarl.rollout.vllm.options import prepare_environment

    prepare_environment()
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(checkpoint)


def text_of(
    tokenizer: Any,
    prompt: Sequence[int],
    tokens: Sequence[int],
    finish_reason: str | None,
) -> str:
    """The text of a whole completion: what vLLM's own detokenizer gives for its tokens after the
    prompt's, the token that ended it and bytes of an unfinished character left out. Not for
    completions that a stop text may end, which has to be seen while they are sampled.
    """
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=_parameters(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    # then the last one is the end token
    detokenizer.update(list(tokens), finish_reason == "stop")
    return detokenizer.get_next_output_text(finished=True, delta=False)


@cache
def _parameters() -> Any:
    """vLLM's defaults: special tokens are left out, and no stop text is looked for."""
    from vllm import SamplingParams

    return SamplingParams()
