"""Requests for completions and log-probs as JSON, and what comes back, read and checked.

Tokens go in and tokens come out: a completion's token ids and log-probs are the sampler's own. Its text, which rewards
read, is the server's decoding of those ids, cut at a stop text as vLLM cuts it in process.
"""

from collections.abc import Sequence
from typing import Any

from rollout.servers.client import AnswerError, LostServerError
from rollout.types import Completion, Prompt, Sampling
from rollout.vllm.requests import sampling_arguments, scoring_arguments

_NOT_A_NUMBER = -9999.0
"""What vLLM's servers send for a log-prob that is NaN or minus infinity, which JSON has no number for."""


def completion_request(prompt: Prompt, sampling: Sampling, j: int, k: int, salt: str) -> dict[str, Any]:
    """Sample k of prompt j of a call. salt: of the prefix cache, so that no key or value of other weights is reused."""
    return {
        "token_ids": list(prompt.token_ids),
        "sampling_params": sampling_arguments(sampling, j, k),
        "output_mode": "text",
        "cache_salt": salt,
    }


def scoring_request(sequence: Sequence[int], salt: str) -> dict[str, Any]:
    """For the log-probs of a sequence's tokens."""
    return {"token_ids": list(sequence), "sampling_params": scoring_arguments(), "cache_salt": salt}


def read_completion(answer: Any, url: str, label: str, version: int) -> Completion:
    """The completion in a server's answer. label: of the weights that have to have sampled all of it. Raises
    `AnswerError` for an answer that is incomplete, `LostServerError` for one of other weights."""
    try:
        (choice,) = answer["choices"]
        tokens, text, finish = tuple(choice["token_ids"]), choice["text"], choice["finish_reason"]
        logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()]
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(url, error) from error
    if finish not in ("stop", "length", "repetition"):
        raise AnswerError(f"the server at {url} ended a completion by {finish!r}")
    if not all(type(token) is int for token in tokens) or not isinstance(text, str):
        raise AnswerError(f"the server at {url} gave tokens or a text that are none: {str(tokens)[:100]}")
    if len(logprobs) != len(tokens) or not tokens:
        raise AnswerError(f"the server at {url} gave {len(logprobs)} log-probs for {len(tokens)} tokens")
    _require_weights(spans, len(tokens), label, url)
    _require_numbers(logprobs, url)
    return Completion(token_ids=tokens, logprobs=logprobs, text=text, weight_version=version, finish_reason=finish)


def read_logprobs(answer: Any, sequence: Sequence[int], url: str, label: str) -> list[float]:
    """Log-probs of tokens 1… of a sequence, in nats. label: of the weights that have to have given them. Raises
    as `read_completion` does."""
    try:
        entries = answer["prompt_logprobs"][1:]
        logprobs = [float(entry[str(token)]["logprob"]) for token, entry in zip(sequence[1:], entries, strict=True)]
        spans = [(s["version"], s["start"], s["end"]) for s in answer["choices"][0]["weight_versions"] or ()]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _unreadable(url, error) from error
    _require_weights(spans, 1, label, url)
    _require_numbers(logprobs, url)
    return logprobs


def _unreadable(url: str, error: Exception) -> AnswerError:
    return AnswerError(f"an answer of the server at {url} cannot be read: {type(error).__name__}: {error}")


def _require_weights(spans: list[tuple[str, int, int]], tokens: int, label: str, url: str) -> None:
    if spans != [(label, 0, tokens)]:
        shown = ", ".join(f"{start} to {end} by {version!r}" for version, start, end in spans) or "by no weights named"
        raise LostServerError(
            f"the server at {url} sampled tokens {shown}, and not all by {label!r}, which was published last: another "
            "run publishes to it, or it was restarted; give every run servers of its own"
        )


def _require_numbers(logprobs: Sequence[float], url: str) -> None:
    if not all(_NOT_A_NUMBER < logprob <= 0 for logprob in logprobs):
        raise AnswerError(f"the server at {url} gave a token a log-prob that is no number; its activations overflow")
