"""A completion's text, made of its tokens once it is whole, as vLLM makes it token by token."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer that vLLM takes from a checkpoint folder, without an engine."""
    from qarl.rollout.vllm.options import prepare_environment

    prepare_environment()
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(checkpoint)


def text_of(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], finish_reason: str | None) -> str:
    """The text of a whole completion: what vLLM's own detokenizer gives for its tokens after the prompt's, the token
    that ended it and bytes of an unfinished character left out. Not for completions that a stop text may end, which
    has to be seen while they are sampled."""
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
    detokenizer.update(list(tokens), finish_reason == "stop")  # then the last one is the end token
    return detokenizer.get_next_output_text(finished=True, delta=False)


@cache
def _parameters() -> Any:
    """vLLM's defaults: special tokens are left out, and no stop text is looked for."""
    from vllm import SamplingParams

    return SamplingParams()
