"""What vLLM's server makes of requests: prompts and sampling parameters, without server or engine.

The server's own classes render a checkpoint's chat template, tokenize, and fill in the defaults of
its generation config. What a greedy request answers follows from that and the weights alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.rollout.coroutines import completed
from qarl.rollout.types import Prompt, RequestDefaults, Sampling
from qarl.rollout.vllm.options import prepare_environment
from qarl.rollout.vllm.requests import loop_detection

DECIDING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "thinking_token_budget",
    "structured_outputs",
    "repetition_detection",
)
"""Fields of `vllm.SamplingParams` on which an answer's tokens depend, besides the seed."""


@dataclass(frozen=True)
class EngineRequest:
    """A request as it reaches the engine."""

    token_ids: tuple[int, ...]
    """Token ids of the prompt."""
    parameters: Mapping[str, Any]
    """The fields `DECIDING` of its sampling parameters.

    `stop_token_ids` has those of the checkpoint's generation config too, which the engine adds.
    """

    def difference(self, other: "EngineRequest") -> str | None:
        """Return in words how another request differs from this one; None if it does not."""
        if self.token_ids != other.token_ids:
            counts = f"{len(self.token_ids)} and {len(other.token_ids)} tokens"
            return f"the prompts are {counts} and differ"
        for name, value in self.parameters.items():
            if value != other.parameters[name]:
                return f"{name} is {value!r} and {other.parameters[name]!r}"
        return None


def request_fields(defaults: RequestDefaults) -> dict[str, Any]:
    """Return the fields that a request has to carry because no file of an export can say them.

    A greedy evaluation's temperature is one, because a generation config cannot hold 0. A request
    that is no chat has a limit, because OpenAI's API gives it 16 tokens otherwise.
    """
    fields: dict[str, Any] = {"temperature": 0} if defaults.greedy else {}
    if not defaults.chat:
        fields["max_tokens"] = defaults.max_new_tokens
    if defaults.stop:
        fields["stop"] = list(defaults.stop)
    if defaults.loop_limit is not None:
        fields["repetition_detection"] = loop_detection(defaults.loop_limit)
    return fields


def served_requests(
    folder: Path,
    dtype: str,
    max_model_len: int,
    bodies: Sequence[Mapping[str, Any]],
    end_tokens: Collection[int] = (),
) -> list[EngineRequest | str]:
    """Return what `vllm serve FOLDER` sends to its engine for requests, or the server's refusals.

    Args:
        folder: Checkpoint folder.
        dtype: Compute dtype.
        max_model_len: Upper bound on prompt and answer tokens.
        bodies: Requests of OpenAI's API without the model: chats if they have `messages`, otherwise
            completions.
        end_tokens: The end tokens of the folder's generation config.
    """
    prepare_environment()
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
    from vllm.entrypoints.scale_out.render.serving import ServingRender
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    # These requests are text. Processors of sound may need libraries that are not installed.
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "language_model_only": True,
    }
    arguments = AsyncEngineArgs(model=str(folder), **settings)
    model = arguments.create_model_config()
    # As vLLM's own rendering server does: no weights are loaded, so no kernel is needed for them.
    model.quantization = None
    renderer = OnlineRenderer(
        model,
        renderer_from_config(VllmConfig(model_config=model)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    names = [BaseModelPath(name=_MODEL, model_path=str(folder))]
    serving = ServingRender(OpenAIModelRegistry(model, names), renderer)

    async def rendered() -> list[EngineRequest | str]:
        return [await _rendered(serving, body, end_tokens) for body in bodies]

    return completed(rendered())


def sampled_requests(
    prompts: Sequence[Prompt], sampling: Sampling, end_tokens: Collection[int] = ()
) -> list[EngineRequest]:
    """Return what a run's engine is sent for the first sample of each prompt.

    end_tokens: the end tokens of the generation config of the engine's checkpoint.
    """
    from qarl.rollout.vllm.engine import vllm_requests

    inputs, parameters = vllm_requests(prompts, sampling)
    first = slice(None, None, sampling.samples)
    return [
        _engine_request(prompt["prompt_token_ids"], params, end_tokens)
        for prompt, params in zip(inputs[first], parameters[first], strict=True)
    ]


_MODEL = "policy"


async def _rendered(
    serving: Any, body: Mapping[str, Any], end_tokens: Collection[int]
) -> EngineRequest | str:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    try:
        if "messages" in body:
            request = ChatCompletionRequest.model_validate({"model": _MODEL, **body})
            answer = await serving.render_chat_request(request)
        else:
            request = CompletionRequest.model_validate({"model": _MODEL, **body})
            answer = await serving.render_completion_request(request)
    except Exception as error:  # the server answers with it, whatever template or tokenizer raised
        return f"{type(error).__name__}: {error}"
    if isinstance(answer, list):
        (answer,) = answer
    if not isinstance(answer, GenerateRequest):
        return str(answer.error.message)
    return _engine_request(answer.token_ids, answer.sampling_params, end_tokens)


def _engine_request(
    token_ids: Sequence[int], params: Any, end_tokens: Collection[int]
) -> EngineRequest:
    parameters = {name: getattr(params, name) for name in DECIDING}
    parameters["stop_token_ids"] = sorted({*(params.stop_token_ids or ()), *end_tokens})
    return EngineRequest(tuple(token_ids), parameters)
