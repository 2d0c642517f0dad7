"""Requests for completions and log-probs as JSON, and the reading and checking of their answers.

Both directions use tokens: a completion's token ids and log-probs are the sampler's own. Its text,
which rewards read, is decoded from those ids here, as it is in process. With stop texts, which have
to be seen while sampling, it is the server's text, cut as vLLM cuts it in process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qarl.rollout.engine import AnswerError, LostServerError
from qarl.rollout.types import Completion, Prompt, Sampling
from qarl.rollout.vllm.requests import sampling_arguments, scoring_arguments

_NOT_A_NUMBER = -9999.0
"""vLLM's servers send this for a log-prob of NaN or minus infinity, which JSON cannot express."""


def completion_request(
    prompt: Prompt, sampling: Sampling, j: int, k: int, salt: str
) -> dict[str, Any]:
    """Return the request for sample k of prompt j of a call.

    salt: the prefix cache's salt, so that no keys or values of other weights are reused.
    """
    return {
        "token_ids": list(prompt.token_ids),
        "sampling_params": sampling_arguments(sampling, prompt, j, k),
        "output_mode": "text" if sampling.stop else "tokens",
        "cache_salt": salt,
    }


def scoring_request(sequence: Sequence[int], salt: str) -> dict[str, Any]:
    """Return the request for the log-probs of a sequence's tokens."""
    return {
        "token_ids": list(sequence),
        "sampling_params": scoring_arguments(),
        "cache_salt": salt,
    }


def read_completion(answer: Any, url: str, labels: Mapping[str, int]) -> Completion:
    """Read and check the completion in a server's answer.

    Its text is empty if only tokens were requested.

    Args:
        answer: The decoded JSON.
        url: The server, for messages.
        labels: Labels of the weights that may have sampled it, oldest first, with their versions.

    Raises:
        AnswerError: The answer is incomplete or malformed.
        LostServerError: Other weights sampled it.
    """
    try:
        (choice,) = answer["choices"]
        tokens = tuple(choice["token_ids"])
        finish = choice["finish_reason"]
        text = choice["text"] if answer["output_mode"] == "text" else ""
        logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
        spans = _spans(choice)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(url, error) from error
    if finish not in ("stop", "length", "repetition"):
        raise AnswerError(f"the server at {url} ended a completion by {finish!r}")
    if not all(type(token) is int for token in tokens) or not isinstance(text, str):
        raise AnswerError(
            f"the server at {url} returned invalid tokens or an invalid text: {str(tokens)[:100]}"
        )
    if len(logprobs) != len(tokens) or not tokens:
        raise AnswerError(
            f"the server at {url} gave {len(logprobs)} log-probs for {len(tokens)} tokens"
        )
    _require_weights(spans, len(tokens), labels, url)
    _require_numbers(logprobs, url)
    starts = [(start, labels[label]) for label, start, _ in spans]
    (_, first_version), *switches = starts
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        text=text,
        weight_version=first_version,
        finish_reason=finish,
        switches=tuple(switches),
    )


def read_logprobs(
    answer: Any, sequence: Sequence[int], url: str, labels: Mapping[str, int]
) -> list[float]:
    """Read and check the log-probs of tokens 1… of a sequence, in nats.

    labels: labels and versions of the weights that may have computed them. Raises the same errors
    as `read_completion`.
    """
    try:
        entries = answer["prompt_logprobs"][1:]
        logprobs = [
            float(entry[str(token)]["logprob"])
            for token, entry in zip(sequence[1:], entries, strict=True)
        ]
        spans = _spans(answer["choices"][0])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _unreadable(url, error) from error
    _require_weights(spans, 1, labels, url)
    _require_numbers(logprobs, url)
    return logprobs


def _unreadable(url: str, error: Exception) -> AnswerError:
    return AnswerError(
        f"an answer of the server at {url} cannot be read: {type(error).__name__}: {error}"
    )


def _spans(choice: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [
        (span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()
    ]


def _require_weights(
    spans: list[tuple[str, int, int]], tokens: int, labels: Mapping[str, int], url: str
) -> None:
    """Check that weights in `labels` sampled all tokens, in the order of their versions."""
    starts = [start for _, start, _ in spans]
    ends = [end for _, _, end in spans]
    # Each span has to start where the one before ends, the first at 0, and the last ends at the
    # last token.
    complete = [*starts, tokens] == [0, *ends]
    versions = [labels.get(label, -1) for label, _, _ in spans]
    if not complete or -1 in versions or versions != sorted(set(versions)):
        parts = [f"{start} to {end} by {label!r}" for label, start, end in spans]
        shown = ", ".join(parts) or "by no weights named"
        published = " and ".join(map(repr, labels))
        since = "which was published last" if len(labels) == 1 else "which were published last"
        raise LostServerError(
            f"the server at {url} sampled tokens {shown}, and not all by {published}, {since}:"
            " another run publishes to it, or it was restarted; give every run servers of its own"
        )


def _require_numbers(logprobs: Sequence[float], url: str) -> None:
    if not all(_NOT_A_NUMBER < logprob <= 0 for logprob in logprobs):
        raise AnswerError(
            f"the server at {url} gave a token a log-prob that is not a number; its activations"
            " overflow"
        )
