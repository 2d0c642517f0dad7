"""Sampling parameters and texts of completions, as vLLM defines them.

They are the same for an engine in this process and for a server. A completion's text is decoded
once it is complete, with the same result as vLLM's decoding token by token.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qarl.rollout.types import LONGEST_PERIOD, Prompt, Sampling


def sampling_arguments(
    sampling: Sampling,
    prompt: Prompt,
    j: int,
    k: int,
) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams` for sample k of prompt j, as plain data."""
    loops = None if sampling.loop_limit is None else loop_detection(sampling.loop_limit)
    draws = prompt.draws or (sampling.first_prompt + j, k, 0)
    limit = sampling.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens
    stop_tokens = {"stop_token_ids": list(sampling.stop_tokens)} if sampling.stop_tokens else {}
    return {
        **stop_tokens,
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
        # Texts are decoded at the end (`text_of`), unless a stop text has to be seen. While it
        # samples, vLLM would also decode every token a second time, for its log-prob's label,
        # between two steps of the model.
        "detokenize": bool(sampling.stop),
        "flat_logprobs": True,  # a few lists per request instead of two objects per token
        "skip_clone": True,  # no other request shares these parameters
    }


def loop_detection(limit: int) -> dict[str, int]:
    """Return vLLM's `repetition_detection` that ends a completion after `limit` repetitions."""
    return {
        "max_pattern_size": LONGEST_PERIOD,
        "min_pattern_size": 1,
        "min_count": limit,
    }


def scoring_arguments() -> dict[str, Any]:
    """Return the arguments of a request for the log-probs of its prompt's tokens, without labels.

    vLLM requires at least one sampled token.
    """
    return {
        "temperature": 0,
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "detokenize": False,
    }


def _stream(seed: int, prompt: int, sample: int, turn: int) -> int:
    """Return a 63-bit seed for one completion.

    It mixes (seed, prompt, sample), and the turn of later turns, so that streams do not overlap.
    """
    later = f"/{turn}" if turn else ""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}{later}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def load_tokenizer(checkpoint: Path) -> Any:
    """Load the tokenizer that vLLM uses for a checkpoint folder, without an engine."""
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
    """Return the text of a finished completion, as vLLM's own detokenizer decodes it.

    It is decoded after the prompt's tokens. The end token and the bytes of an unfinished character
    are left out. Not for completions that a stop text may end, because stop texts have to be seen
    while sampling.
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
    # After "stop" the last token is the end token, which has no text.
    detokenizer.update(list(tokens), finish_reason == "stop")
    return detokenizer.get_next_output_text(finished=True, delta=False)


@cache
def _parameters() -> Any:
    """Return vLLM's default parameters: special tokens left out, no stop texts."""
    from vllm import SamplingParams

    return SamplingParams()
