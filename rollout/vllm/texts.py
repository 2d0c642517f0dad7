"""A completion's text, made of its tokens once it is whole, as vLLM makes it token by token."""

from typing import Any


def text_of(tokenizer: Any, output: Any, params: Any) -> str:
    """The text of a finished `vllm.RequestOutput`'s one completion: what vLLM's own detokenizer gives for its tokens
    after the prompt's, the token that ended it and bytes of an unfinished character left out.

    params: the `vllm.SamplingParams` it was sampled with; where they ask for detokenization (a stop text has to be seen
    while it is sampled) the text is there already.
    """
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    completion = output.outputs[0]
    if params.detokenize:
        return completion.text
    request = EngineCoreRequest(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    ended = completion.finish_reason == "stop"  # by the end token: no stop texts were given
    detokenizer.update(list(completion.token_ids), ended)
    return detokenizer.get_next_output_text(finished=True, delta=False)
